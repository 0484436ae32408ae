"""The worker's settings, built once at the edge: the one file that reads environment variables."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from producer.keys import DEFAULT_PREFIX, DEFAULT_QUEUE, Keys
from producer.limits import MAX_WAITING_BYTES
from producer.scripts import Policy
from producer.server_url import checked_url

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
VARIABLE_PREFIX = "CUA_"
MAX_PORT = 65_535
LOG_FORMATS = ("text", "json")
DEVICE_PATTERN = re.compile(r"(cpu|cuda(:[0-9]+)?)?")


class SettingsError(ValueError):
    """A setting is not what it may be; the message names it, what was found and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """How a worker runs. Each field is also an environment variable: `CUA_` and its name in capitals."""

    redis_url: str = field(default=DEFAULT_REDIS_URL, repr=False)
    """Where the queue is, as `producer.server_url` reads it. It may hold a password, so it is never printed."""
    queue: str = DEFAULT_QUEUE
    """The queue's name."""
    prefix: str = DEFAULT_PREFIX
    """What the product's keys begin with."""
    checkpoint: str = "checkpoint"
    """The checkpoint's folder."""
    device: str = ""
    """`cuda:<index>` or `cpu`; "" chooses: the first GPU if there is one."""
    runtime_dir: str = ""
    """Where the device's lock file lies; "" is the user's runtime folder."""
    result_ttl_s: int = 3600
    """How long a result is kept."""
    lease_s: float = 30.0
    """A job whose worker is not heard of for this long goes to another one; more than the longest stall."""
    beat_s: float = 5.0
    """How often the worker is heard of."""
    max_attempts: int = 3
    """How often a job is started before it ends as `worker_lost`."""
    patience_s: float = 600.0
    """How long the worker waits for a server that is gone before it gives up."""
    max_waiting_bytes: int = MAX_WAITING_BYTES
    """The bound on waiting bytes that the producers have; the server's maxmemory must leave room for it."""
    stage_limit_s: float = 60.0
    """A job's stage that lasts longer is taken for a hang and ends the process; the usual deadline of a job."""
    start_limit_s: float = 1800.0
    """A start that lasts longer, up to the first job that could be taken, is taken for a hang too."""
    restart_pause_s: float = 1.0
    """A supervisor's first pause before it starts a dead worker again; each next one is twice as long, up to 60."""

    metrics_port: int = 0
    """Where metrics are served for Prometheus; 0 serves none. Supervised workers count up from it, one a device."""
    metrics_host: str = "127.0.0.1"
    """The address that metrics are served at; beyond this machine only if it says so."""
    log_format: str = "text"
    """`text`, or `json`: one object a line on standard output."""

    image_cache_bytes: int = 4 << 30
    """On a GPU, how much memory the states of past screenshots may take; 0 keeps none."""
    eager: bool = False
    """On a GPU, never capture a graph."""

    def __post_init__(self) -> None:
        if self.image_cache_bytes < 0:
            raise SettingsError(f"image_cache_bytes is {self.image_cache_bytes}; 0 (none) or more is allowed")
        for name in (
            "result_ttl_s", "lease_s", "beat_s", "max_attempts", "patience_s", "stage_limit_s", "start_limit_s",
            "restart_pause_s", "max_waiting_bytes",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise SettingsError(f"{name} is {getattr(self, name):g}; a number above 0 is allowed")
        if not 0 <= self.metrics_port <= MAX_PORT:
            raise SettingsError(f"metrics_port is {self.metrics_port}; 1 to {MAX_PORT}, or 0 for none, is allowed")
        if self.log_format not in LOG_FORMATS:
            raise SettingsError(f"log_format is {self.log_format!r}; {' or '.join(LOG_FORMATS)} is allowed")
        if self.lease_s < 2 * self.beat_s:
            raise SettingsError(f"lease_s is {self.lease_s:g}; at least two beats of {self.beat_s:g} s are needed")
        if not DEVICE_PATTERN.fullmatch(self.device):
            raise SettingsError(f"device is {self.device!r}; cpu, cuda or cuda:<index> is allowed")
        try:
            Keys(self.prefix, self.queue)
            checked_url(self.redis_url)
        except ValueError as error:
            raise SettingsError(str(error)) from None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings that the environment's `CUA_` variables give; what is not set keeps its default.

        Raises:
            SettingsError: a value is not allowed.
        """
        environment = os.environ if environment is None else environment
        given = {field.name: environment.get(VARIABLE_PREFIX + field.name.upper()) for field in fields(cls)}
        kinds = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {
            name: _converted(name, text, kinds[name]) for name, text in given.items() if text is not None
        }
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        """The variables from which `from_environment` makes these settings, for a process of the same kind."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            VARIABLE_PREFIX + name.upper(): str(int(value) if isinstance(value, bool) else value)
            for name, value in values.items()
        }

    @property
    def keys(self) -> Keys:
        """The queue's Redis keys."""
        return Keys(self.prefix, self.queue)

    @property
    def policy(self) -> Policy:
        """What the server-side scripts are told."""
        return Policy(self.result_ttl_s, self.max_attempts)

    @property
    def worker_ttl_s(self) -> int:
        """A worker not heard of for this long is gone."""
        return max(1, round(self.lease_s))

    @property
    def stall_limit_s(self) -> float:
        """A worker whose beat stops for this long hangs; its jobs are another one's after half of it."""
        return 2 * self.lease_s

    @property
    def stop_limit_s(self) -> float:
        """A worker that was asked to leave has done so by now, the job in hand ended, or hangs."""
        return self.stage_limit_s + 10.0

    @property
    def lock_dir(self) -> Path:
        """The folder of the devices' lock files: the given one, else the user's runtime folder."""
        if self.runtime_dir:
            return Path(self.runtime_dir)
        if runtime := os.environ.get("XDG_RUNTIME_DIR"):
            return Path(runtime) / "cua-worker"
        return Path(tempfile.gettempdir()) / f"cua-worker-{os.getuid()}"


def _converted(name: str, text: str, kind: type) -> str | int | float:
    if kind is str:
        return text
    if kind is bool:
        if text not in ("0", "1"):
            raise SettingsError(f"{VARIABLE_PREFIX}{name.upper()} is {text!r}; 0 or 1 is allowed")
        return text == "1"
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise SettingsError(f"{VARIABLE_PREFIX}{name.upper()} is {text!r}; {what} is allowed") from None
