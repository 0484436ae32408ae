"""A queue's workers as a person reads them: what each says of itself, and its line in a table."""

from __future__ import annotations

from typing import NamedTuple

import redis
import redis.exceptions as redis_errors

from producer.keys import Keys
from worker.queue_facts import SERVING_STATES

HEADER = ("worker", "state", "device", "jobs", "model", "last beat")


class Status(NamedTuple):
    """A queue as it is: each worker's fields by name, and how many jobs wait and run."""

    workers: dict[str, dict[str, str]]
    waiting: int
    running: int

    @property
    def is_serving(self) -> bool:
        """Whether any worker takes jobs."""
        return any(worker.get("state") in SERVING_STATES for worker in self.workers.values())


def row(name: str, worker: dict[str, str]) -> tuple[str, ...]:
    """A worker's line under `HEADER`."""
    state = " ".join(part for part in (worker.get("state", ""), worker.get("progress", "")) if part)
    if worker.get("error"):
        state += f": {worker['error'].splitlines()[0][:60]}"
    shown = (worker.get(field, "") for field in ("gpu", "jobs", "model", "last_beat"))
    return (name, state, *shown)


def read_status(client: redis.Redis, keys: Keys) -> tuple[Status | None, str]:
    """The status, or None and why the server cannot tell it. The client decodes replies."""
    try:
        names = [str(name) for name in client.zrange(keys.workers, 0, -1)]
        with client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hgetall(keys.worker(name))
            pipeline.llen(keys.queue)
            pipeline.zcard(keys.leases)
            *workers, waiting, running = pipeline.execute()
    except redis_errors.RedisError as error:
        return None, str(error)
    # A worker that is gone stays on the list a while; its hash has expired.
    living = {name: worker for name, worker in zip(names, workers, strict=True) if worker}
    return Status(living, waiting, running), ""
