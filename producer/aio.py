"""The asyncio client: runs `protocol`'s steps over an asyncio Redis connection pool. `Client` is its blocking twin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import redis.exceptions as redis_errors
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from producer.client import server_name
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
from producer.server_url import connect_async


class AsyncClient:
    """`Client`, awaited: the same arguments, results and errors. Safe to share between the tasks of one event loop."""

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
        self._redis = connect_async(
            url,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    async def submit(
        self,
        image: ImageInput,
        questions: Questions,
        *,
        job_id: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> str:
        """As `Client.submit`. A path is read and a PIL image encoded in this thread."""
        job = await self._run(self._protocol.submit(payload_of(image, questions), job_id, deadline_s))
        return job.job_id

    async def submit_many(self, jobs: Iterable[Job]) -> list[str]:
        """As `Client.submit_many`."""
        return await self._run(self._protocol.submit_many(packed_jobs(jobs)))

    async def result(self, job_id: str, timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> Result:
        """As `Client.result`."""
        return await self._run(self._protocol.result(job_id, timeout_s))

    async def results(self, job_ids: Sequence[str], timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> list[Result]:
        """As `Client.results`."""
        return await self._run(self._protocol.results(job_ids, timeout_s))

    async def decide(
        self,
        image: ImageInput,
        questions: Questions,
        *,
        job_id: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        timeout_s: float | None = None,
    ) -> Result:
        """As `Client.decide`. Cancelling the task takes the job back, too."""
        return await self._run(self._protocol.decide(payload_of(image, questions), job_id, deadline_s, timeout_s))

    async def recent(self, most: int = DEFAULT_RECENT, *, after: datetime | None = None) -> list[Result]:
        """As `Client.recent`."""
        return await self._run(self._protocol.recent(most, after))

    async def cancel(self, job_id: str) -> bool:
        """As `Client.cancel`."""
        return await self._run(self._protocol.cancel(job_id))

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    replies = await self._do(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(replies)
        except StopIteration as stop:
            value: T = stop.value
            return value
        except redis_errors.RedisError as error:
            raise outside_error(error, server_name(self._redis.connection_pool.connection_kwargs)) from error

    async def _do(self, step: Batch | Pause) -> list[Any]:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return []
        async with self._redis.pipeline(transaction=step.is_atomic) as pipeline:
            for command in step.commands:
                pipeline.execute_command(*command)
            return await pipeline.execute()
