"""Where the queue is, and the one place of this package that reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from producer.keys import DEFAULT_PREFIX, DEFAULT_QUEUE

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"


@dataclass(frozen=True)
class Settings:
    """The queue's place.

    Attributes:
        redis_url: the server (`CUA_REDIS_URL`); may hold a password, so it is never printed.
        queue: the queue's name (`CUA_QUEUE`).
        prefix: what the project's own keys begin with (`CUA_PREFIX`).
    """

    redis_url: str = field(default=DEFAULT_REDIS_URL, repr=False)
    queue: str = DEFAULT_QUEUE
    prefix: str = DEFAULT_PREFIX

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The settings of the environment; a variable that is unset or empty leaves the default."""
        return cls(
            redis_url=environment.get("CUA_REDIS_URL") or DEFAULT_REDIS_URL,
            queue=environment.get("CUA_QUEUE") or DEFAULT_QUEUE,
            prefix=environment.get("CUA_PREFIX") or DEFAULT_PREFIX,
        )
