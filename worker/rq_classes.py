"""RQ's classes with everything taken out that could run a stranger's code: for `rq info`, `rq requeue`, dashboards.

Name them in RQ_JOB_CLASS and RQ_QUEUE_CLASS (and worker.GpuWorker in RQ_WORKER_CLASS). They show jobs; a job is put on
the queue by `producer.Client` and ended by a worker alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]
from redis import Redis
from rq.exceptions import InvalidJobOperationError
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.utils import as_text, decode_redis_hash, str_to_date

from producer.scripts import CALL, CANCEL, call
from worker.settings import Settings

MAX_SHOWN_CHARACTERS = 200


class MsgpackSerializer:
    """RQ's serializer interface over msgpack: loading makes data, never objects."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        """Pack a value."""
        packed: bytes = msgpack.packb(value)
        return packed

    @staticmethod
    def loads(data: bytes) -> Any:
        """Unpack a value."""
        return msgpack.unpackb(data, strict_map_key=True)


def _date(value: bytes) -> bytes | None:
    try:
        str_to_date(value)
    except ValueError:
        return None
    return value


def _status(value: bytes) -> bytes | None:
    return value if as_text(value) in list(JobStatus) else None


def _text(value: bytes) -> bytes:
    return value.decode("utf-8", "replace")[:MAX_SHOWN_CHARACTERS].encode()


def _seconds(value: bytes) -> bytes | None:
    return value if value.isdigit() and len(value) < 10 else None


# What of a job's record is read at all, and how it is made harmless; the rest is as if it were not there.
_READ: dict[str, Callable[[bytes], bytes | None]] = {
    **dict.fromkeys(("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat"), _date),
    **dict.fromkeys(("origin", "description", "worker_name"), _text),
    "status": _status,
    "timeout": _seconds,
}


class SafeJob(Job):
    """A job to look at. Its record is read by an allowlist, nothing is unpickled, inflated or imported."""

    def __init__(self, id: str | None = None, connection: Redis | None = None, serializer: object = None) -> None:
        """As RQ calls it; the serializer is ours whatever is asked for."""
        super().__init__(id, connection, MsgpackSerializer)

    def restore(self, raw_data: Any) -> None:
        """Take over what `_READ` lets through."""
        found = decode_redis_hash(raw_data)
        read = {name: clean(found[name]) for name, clean in _READ.items() if isinstance(found.get(name), bytes)}
        super().restore({**{name: value for name, value in read.items() if value}, "data": CALL})

    @property
    def func(self) -> None:
        """Nothing: no job names what is run."""
        return

    @property
    def success_callback(self) -> None:
        """None, whatever the record says."""
        return

    @property
    def failure_callback(self) -> None:
        """None, whatever the record says."""
        return

    @property
    def stopped_callback(self) -> None:
        """None, whatever the record says."""
        return

    @property
    def dependents_key(self) -> str:
        """A key that is never written: RQ's clean-up would load the jobs named there with its own class."""
        return f"{self.key}:no-dependents"

    def perform(self) -> NoReturn:
        """Refused: only `worker.GpuWorker` takes jobs."""
        raise InvalidJobOperationError("this queue's jobs are run by worker.GpuWorker alone")

    def save(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused, and so is a requeue: the payload is gone when a job has ended."""
        raise InvalidJobOperationError("an ended job's screenshot is gone: submit it again with producer.Client")

    def set_status(self, status: JobStatus, pipeline: object = None) -> None:
        """Nothing: RQ's clean-up must not end a job that a worker has."""

    def _handle_failure(self, *args: object, **kwargs: object) -> None:
        """Nothing, for the same reason."""

    def send_webhooks(self, *args: object, **kwargs: object) -> None:
        """Nothing: a record names no address that is called."""

    def get_meta(self, refresh: bool = True) -> dict[str, Any]:
        """Nothing."""
        return {}

    def latest_result(self, timeout: int = 0) -> None:
        """None: RQ would inflate what stands there. The result is `cua:result:<id>`."""
        return

    def results(self) -> list[Any]:
        """Nothing, for the same reason."""
        return []

    def return_value(self, refresh: bool = False) -> None:
        """None, for the same reason."""
        return


class SafeQueue(Queue):
    """A queue to look at and to empty. Whatever job class or serializer is asked for, it uses ours."""

    job_class = SafeJob

    def __init__(self, name: str = "default", connection: Redis | None = None, **discarded: object) -> None:
        """As RQ calls it."""
        super().__init__(name, connection, job_class=SafeJob, serializer=MsgpackSerializer)

    def empty(self) -> int:
        """Cancel every waiting job; returns how many."""
        settings = replace(Settings.from_environment(), queue=self.name)
        cancelled = 0
        for job_id in self.connection.lrange(self.key, 0, -1):
            text = job_id if isinstance(job_id, str) else job_id.decode(errors="replace")
            command = call(CANCEL, settings.keys, settings.policy, text, "")
            reply = self.connection.execute_command(*command)  # type: ignore[no-untyped-call]
            cancelled += reply[0] == b"cancelled"
        return cancelled

    def enqueue_dependents(self, *args: object, **kwargs: object) -> None:
        """Nothing: jobs have no dependents."""

    def _enqueue_job(self, *args: object, **kwargs: object) -> NoReturn:
        raise InvalidJobOperationError("submit with producer.Client, python -m producer, or its protocol")
