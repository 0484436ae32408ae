"""The blocking client: runs `protocol`'s steps over a Redis connection pool. What is said stands there, not here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import redis.exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from producer.keys import DEFAULT_PREFIX, DEFAULT_QUEUE, Keys
from producer.limits import MAX_WAITING_BYTES, MAX_WAITING_JOBS
from producer.protocol import (
    CONNECT_TIMEOUT_S,
    DEFAULT_DEADLINE_S,
    DEFAULT_RECENT,
    DEFAULT_RESULT_TIMEOUT_S,
    SOCKET_TIMEOUT_S,
    Batch,
    Job,
    Pause,
    Protocol,
    Questions,
    Steps,
    T,
    outside_error,
    packed_jobs,
    payload_of,
)
from producer.result import Result
from producer.screenshot import ImageInput
from producer.scripts import Policy
from producer.server_url import connect

# Arguments over this are sent as they are, not joined with their neighbours.
PACK_CUTOFF_BYTES = 16_384


class Client:
    """Submits screenshots with questions and waits for their answers. Safe to share between threads.

    Args:
        url: `redis://`, `rediss://` or `unix://`, as redis-py takes it, or `redis+sentinel://host:port,.../service`.
        queue: the queue's name.
        prefix: what the product's keys begin with.
        max_waiting_jobs, max_waiting_bytes: over either, a submission is refused with `QueueFull`.
        result_ttl_s: how long the end of a job that no worker ended (cancelled, expired) is kept.
        reconnect_s: how long submitting and cancelling try to reach the server.

    Raises of all methods:
        ServerUnavailable: the server cannot be reached, or refuses this user.
    """

    def __init__(
        self,
        url: str,
        *,
        queue: str = DEFAULT_QUEUE,
        prefix: str = DEFAULT_PREFIX,
        max_waiting_jobs: int = MAX_WAITING_JOBS,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        result_ttl_s: int = 3600,
        reconnect_s: float = 5.0,
    ) -> None:
        keys, policy = Keys(prefix, queue), Policy(result_ttl_s)
        self._protocol = Protocol(keys, policy, max_waiting_jobs, max_waiting_bytes, reconnect_s)
        # The steps repeat what may be repeated; the library repeating on its own would only multiply the waits.
        # hiredis would copy a payload into a buffer that grows piece by piece, 2 to 6 ms for 1 MiB; this packer sends
        # the payload as it lies.
        self._redis = connect(
            url,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            command_packer=PythonRespSerializer(PACK_CUTOFF_BYTES, _encode),
        )

    def submit(
        self,
        image: ImageInput,
        questions: Questions,
        *,
        job_id: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> str:
        """Put a job on the queue and return its id. The same id with the same image and questions is the same job.

        Args:
            image: a PNG or JPEG file's bytes, a path to one, a data URL, or a PIL image (sent as PNG); at most
                1,048,576 pixels: `fit_screenshot` shrinks a larger one.
            questions: by name, maps with `instructions` and `criteria` (contract, section 1); `type` may be left out.
            job_id: 1-64 letters, digits, `_` or `-`; None for a fresh one.
            deadline_s: a job not taken within this many seconds ends as `expired`.

        Raises:
            RequestRefused: it breaks the contract; nothing was sent.
            DuplicateId: the id belongs to a job with other bytes.
            QueueFull: too much waits already; it says when to try again.
        """
        return self._run(self._protocol.submit(payload_of(image, questions), job_id, deadline_s)).job_id

    def submit_many(self, jobs: Iterable[Job]) -> list[str]:
        """Put several jobs on the queue, all or none, and return their ids in the order given.

        All are checked before any is sent; when the queue refuses one, those queued before it are taken back.

        Raises:
            RequestRefused: some break the contract; the faults of the third stand under `jobs.2`.
            DuplicateId, QueueFull: as `submit`.
        """
        return self._run(self._protocol.submit_many(packed_jobs(jobs)))

    def result(self, job_id: str, timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> Result:
        """Wait for a job's end. The wait blocks on the server.

        Raises:
            UnknownJob: there is neither a job nor a result under this id; raised at once.
            ResultTimeout: no end within `timeout_s` seconds; the job goes on.
            MalformedResult: what stands under the id is not a result.
        """
        return self._run(self._protocol.result(job_id, timeout_s))

    def results(self, job_ids: Sequence[str], timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> list[Result]:
        """Wait for the ends of several jobs, `timeout_s` seconds for all together; the results in the order given.

        Raises: as `result`, for the first id in order that has no result; ask again, nothing is lost.
        """
        return self._run(self._protocol.results(job_ids, timeout_s))

    def decide(
        self,
        image: ImageInput,
        questions: Questions,
        *,
        job_id: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        timeout_s: float | None = None,
    ) -> Result:
        """Submit and wait: the arguments and errors of both. Giving up takes the job back.

        `timeout_s` covers it all, from connecting to the result (`deadline_s` and half a minute when left out). Only a
        server that has stopped answering can hold it longer: for the 5 s of a connection or the 15 s of a reply.
        """
        return self._run(self._protocol.decide(payload_of(image, questions), job_id, deadline_s, timeout_s))

    def recent(self, most: int = DEFAULT_RECENT, *, after: datetime | None = None) -> list[Result]:
        """The queue's jobs that ended last, newest first, whoever submitted them: at most the last 1000.

        Args:
            most: at most so many.
            after: only those whose `finished_at` is later.

        Raises:
            ValueError: `most` is not 1 to 1000, or `after` has no time zone.
        """
        return self._run(self._protocol.recent(most, after))

    def cancel(self, job_id: str) -> bool:
        """Take a job back: True if it has ended as `cancelled` or will when the work in hand is over, False if it had
        ended before.

        Raises:
            UnknownJob: there is no such job.
        """
        return self._run(self._protocol.cancel(job_id))

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    replies = self._do(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(replies)
        except StopIteration as stop:
            value: T = stop.value
            return value
        except redis_errors.RedisError as error:
            raise outside_error(error, server_name(self._redis.connection_pool.connection_kwargs)) from error

    def _do(self, step: Batch | Pause) -> list[Any]:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return []
        with self._redis.pipeline(transaction=step.is_atomic) as pipeline:
            for command in step.commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            return pipeline.execute()


def _encode(argument: str | bytes | float) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()


def server_name(connection_kwargs: dict[str, Any]) -> str:
    """Where a pool connects to, without user and password."""
    if path := connection_kwargs.get("path"):
        return str(path)
    return f"{connection_kwargs.get('host', 'localhost')}:{connection_kwargs.get('port', 6379)}"
