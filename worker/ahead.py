"""The next job's CPU work beside the running one: a second thread claims that job and prepares it.

It looks only while the device computes, holds one job at most, and takes none that an idle worker could begin at once
(the server knows). Its connection is its own. A job that it holds is begun by the worker, or goes back. While one is
held, it also writes the end of the job before, so that the device need not wait for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

from producer.contract import Request
from worker.answer import Outcome
from worker.link import Claim, Link

# It begins to look so long before the device is expected to be free: enough to fetch and prepare a large screenshot.
# Earlier, a job would only wait here for a device while another worker's became free.
LEAD_S = 0.25
# How often it looks.
POLL_S = 0.003
# After a job that was over before the first look, it begins this much late at most: to wake a thread for a look that
# does not come costs a job 0.1 ms.
TICK_S = 0.1


class Ready(NamedTuple):
    """A job whose CPU work is done. `started_s` is when the worker had nothing else to do, of `time.monotonic`."""

    claim: Claim
    started_s: float
    request: Request
    prepared: object


class Ending(NamedTuple):
    """How a job ends, and what the process must end with, if it must."""

    claim: Claim
    started_s: float
    outcome: Outcome
    fatal: Exception | None = None


class Ahead:
    """At most one job, prepared while another one computes. `ended_jobs` counts those that needed no device.

    Args:
        link: this thread's own.
        prepare: a claimed job's CPU work.
        end: writes the end of a job.
        looks: False never prepares one.
    """

    def __init__(
        self,
        link: Link,
        prepare: Callable[[Claim], Ready | Ending],
        end: Callable[[Link, Ending], None],
        *,
        looks: bool = True,
    ) -> None:
        self._link = link
        self._prepare = prepare
        self._end = end
        self._looks = looks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._job: Future[Ready | None] | None = None
        self._ended: Ending | None = None
        self._written: Future[None] | None = None
        self.ended_jobs = 0
        self._last_s = LEAD_S
        self._starting = threading.Lock()
        self._is_free = threading.Event()
        self._is_free.set()
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="ahead-tick", daemon=True)

    def __enter__(self) -> Self:
        if self._looks:
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is to be written; give back the job that is held."""
        try:
            ready = self.take()
            self.settle()
            if ready is not None:
                self._link.give_back(ready.claim)
        finally:
            self._closed.set()
            self._thread.shutdown()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Write what is to be written and look for the next job while the block computes.

        What was found before must have been taken.
        """
        started_s = time.monotonic()
        if self._ended is not None:
            self._written = self._thread.submit(self._end, self._link, self._ended)
            self._ended = None
        self._is_free = threading.Event()  # from here on the tick may begin to look, too: behind the writing
        if self._last_s >= POLL_S:
            self._start_looking(max(POLL_S, self._last_s - LEAD_S))
        try:
            yield
        finally:
            with self._starting:
                self._is_free.set()
            self._last_s = time.monotonic() - started_s

    def is_holding(self) -> bool:
        """Whether a prepared job is there, without waiting for it."""
        job = self._job
        return job is not None and job.done() and job.exception() is None and job.result() is not None

    def write_beside(self, ended: Ending) -> None:
        """Write the end of a job beside the next one's work on the device."""
        self._ended = ended

    def settle(self) -> None:
        """Return when the end of every job that was on the device is written: ends have the order of the jobs."""
        if self._written is not None:
            self._written.result()
            self._written = None
        if self._ended is not None:  # and there was no next one
            self._end(self._link, self._ended)
            self._ended = None

    def take(self) -> Ready | None:
        """The job that was found, if any, when it is prepared."""
        job, self._job = self._job, None
        return job.result() if job is not None else None

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            self._start_looking(POLL_S)

    def _start_looking(self, pause_s: float) -> None:
        """Unless nothing computes, or it looks already."""
        with self._starting:
            if self._looks and self._job is None and not self._is_free.is_set():
                self._job = self._thread.submit(self._look, self._is_free, pause_s)

    def _look(self, is_free: threading.Event, pause_s: float) -> Ready | None:
        while not is_free.wait(pause_s):
            pause_s = POLL_S
            claim = self._link.take_ahead()
            if claim is None:
                continue
            job = self._prepare(claim)
            if isinstance(job, Ready):
                return job
            self._end(self._link, job)
            self.ended_jobs += 1
        return None
