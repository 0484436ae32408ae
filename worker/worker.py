"""Read this first: a worker's life. `_next` and `_answer` are the life of one job: take -> prepare -> decide -> finish.

It is ready before it takes anything: checkpoint verified, loaded, warmed up. Then one job at a time on the device, in
this process and thread: no fork, no alarm signal, nothing imported by a name from the queue. While it computes, `ahead`
takes and prepares the next one. Talking to the server is `link`'s and `beat`'s matter, what an end says `answer`'s.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import NoReturn, TypeVar

import redis
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT
from rq.job import Job
from rq.queue import Queue
from rq.worker import DequeueStrategy, SimpleWorker

from producer.contract import parse_request
from producer.errors import RequestRefused
from worker.ahead import Ahead, Ending, Ready
from worker.answer import (
    Engine,
    Report,
    answered,
    contract_refused,
    exit_code_of,
    failed,
    questions_of,
    refusal_faults,
    refused,
)
from worker.beat import SERVING, Beat, Pulse, identity_facts
from worker.link import Claim, Link, ServerLost, own_client
from worker.lock import Device, DeviceLock, DeviceTaken
from worker.logs import TEXT_FORMAT, event, set_up
from worker.metrics import NoMetrics, metrics_of
from worker.progress import Progress
from worker.rq_classes import MsgpackSerializer, SafeJob, SafeQueue
from worker.settings import Settings, SettingsError
from worker.watchdog import limited

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DEVICE = 5
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# A job that took longer to prepare may have been cancelled since it was taken: worth asking the server.
LOOK_AFTER_S = 0.005

log = logging.getLogger("worker")
T = TypeVar("T")


class Stopped(Exception):
    """A signal asked the worker to leave while it started."""


class GpuWorker(SimpleWorker):
    """Answers the jobs of one queue with one engine.

    Runs as `rq worker -w worker.GpuWorker screenshots` (settings from the environment) or as `python -m worker run`.
    Whatever job class, serializer, exception handler or scheduler RQ's command line asks for is discarded.
    """

    job_class: type[Job] = SafeJob
    queue_class: type[Queue] = SafeQueue

    def __init__(
        self,
        queues: str | Queue | Sequence[str | Queue],
        name: str | None = None,
        *,
        connection: redis.Redis,
        settings: Settings | None = None,
        prepare_for_work: bool = True,
        **discarded: object,
    ) -> None:
        """As RQ constructs it; `settings` is the environment's when left out.

        Args:
            queues: one queue, by name or as RQ's object. None of them at all when RQ only wants to show a worker.
            name: the worker's name; a fresh one when left out.
            connection: says where the server is; the worker opens its own connections there.
            settings: all but the queue's name.
            prepare_for_work: False when RQ only wants to show a worker.

        Raises:
            SettingsError: more than one queue, or a name or setting that is not allowed.
        """
        if prepare_for_work and name is not None and not NAME_PATTERN.fullmatch(name):
            raise SettingsError(f"worker name {name!r}: 1-64 letters, digits, '_', '.' or '-' are allowed")
        given = [queues] if isinstance(queues, str | Queue) else list(queues)
        names = [queue if isinstance(queue, str) else queue.name for queue in given]
        if len(names) > 1:
            raise SettingsError(f"one queue a worker; these are {len(names)}: {', '.join(names)}")
        super().__init__(
            [SafeQueue(queue, connection=connection) for queue in names],
            name or fresh_name(),
            connection=connection,
            job_class=SafeJob,
            queue_class=SafeQueue,
            prepare_for_work=prepare_for_work,
            serializer=MsgpackSerializer,
        )
        settings = settings or Settings.from_environment()
        self.settings = replace(settings, queue=names[0]) if names else settings
        self.exit_code = 0
        self._pulse = Pulse()
        self._engine: Engine | None = None
        self._lock: DeviceLock | None = None
        self._is_ready = False
        self._metrics = NoMetrics()

    def work(
        self,
        burst: bool = False,
        logging_level: str | None = None,
        date_format: str = DEFAULT_LOGGING_DATE_FORMAT,
        log_format: str = TEXT_FORMAT,
        max_jobs: int | None = None,
        max_idle_time: int | None = None,
        with_scheduler: bool = False,
        dequeue_strategy: DequeueStrategy = DequeueStrategy.DEFAULT,
    ) -> bool:
        """Start, answer jobs until asked to leave, leave. Returns whether any job was answered.

        Args:
            burst: leave when the queue is empty.
            max_jobs, max_idle_time: leave after so many jobs, or idle seconds.
            logging_level, date_format, log_format: of the lines about the worker's events.
            with_scheduler, dequeue_strategy: RQ's, without a meaning here.

        Raises:
            SystemExit: it could not start or go on: 1, 2 (settings), 3 (checkpoint), 4 (warm-up) or 5 (device).
        """
        set_up(self.settings, logging_level or "INFO", date_format, log_format)
        answered_jobs = 0
        with self._life() as (link, beat), metrics_of(self.connection, self.settings) as self._metrics:
            self._start(link, beat)
            with Ahead(self._link(), self._prepare, self._end, looks=max_jobs is None) as ahead:
                answered_jobs = self._serve(link, ahead, burst, max_jobs, max_idle_time)
        if self.exit_code:
            sys.exit(self.exit_code)
        return answered_jobs > 0

    def choose_device(self) -> Device:
        """The device to compute on."""
        from worker.loading import choose_device

        return choose_device(self.settings.device)

    def load_engine(self, device: Device, report: Report) -> Engine:
        """The engine on a device, verified and loaded, but not warm."""
        from worker.loading import load_engine

        return load_engine(self.settings, device, report)

    def console(self) -> Report:
        """Shows the start's progress to whoever looks at standard error."""
        from engine.checkpoint.report import ProgressReport

        return ProgressReport()

    @contextmanager
    def _life(self) -> Iterator[tuple[Link, Beat]]:
        """Everything around the work: signals, the beat, the device's lock; at the end, signing off and the reason."""
        link = self._link()
        beat = Beat(own_client(self.connection), self.settings, self.name, self._pulse)
        beat.start()
        try:
            yield link, beat
        except Stopped:
            log.info("worker stopped before it was ready")
        except (SettingsError, DeviceTaken) as error:
            self._fail(EXIT_USAGE, str(error))
        except ServerLost as error:
            self._fail(EXIT_FAILED, str(error))
        except Exception as error:
            exit_code = exit_code_of(error)
            if exit_code is None:
                log.error("worker failed:\n%s", "".join(traceback.format_tb(error.__traceback__)))
            self._fail(exit_code or EXIT_FAILED, f"{type(error).__name__}: {error}")
        finally:
            beat.stop()
            if self.exit_code:
                beat.beat()
            link.leave(keep=self.exit_code != 0)
            if self._lock:
                self._lock.release()

    def _link(self) -> Link:
        return Link(
            own_client(self.connection),
            self.settings,
            self.name,
            is_stopping=lambda: self._stop_requested,
            on_end=lambda status, code: self._metrics.ended(status, code),
        )

    def _start(self, link: Link, beat: Beat) -> None:
        """All that comes before the first job."""
        self._install_signal_handlers()
        starting = event("worker_starting", worker=self.name, queue=self.settings.queue)
        log.info("worker starting name=%s queue=%s", self.name, self.settings.queue, extra=starting)
        with limited(self.settings.start_limit_s):
            device = self.choose_device()
        log.info("device %s (%s)%s", device.name, device.description, "" if self.settings.device else ", chosen")
        self._lock = DeviceLock(self.settings.lock_dir, device.key, self.name)
        self._pulse.facts |= {
            "device": device.name,
            "gpu": device.description,
            "started_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        }
        link.check_server()
        report = Progress(self._pulse, self.console())
        with limited(self.settings.start_limit_s):
            self._engine = self.load_engine(device, report)
            identity = self._engine.identity
            self._pulse.facts |= identity_facts(identity.name, dict(identity.hashes))
            self._metrics.answers(identity.name, identity.hashes, getattr(self._engine, "stats", None))
            self._pulse.state = "warming"
            self._engine.warm_up(report)
        self._pulse.facts["progress"] = ""
        self._pulse.state = SERVING
        self._is_ready = True
        beat.beat()  # says what answers before the first answer can be read
        ready = event("worker_ready", worker=self.name, model=identity.name)
        log.info("worker ready name=%s model=%s", self.name, identity.name, extra=ready)

    def _serve(self, link: Link, ahead: Ahead, burst: bool, max_jobs: int | None, max_idle_s: float | None) -> int:
        """Answer jobs until there is a reason to leave; returns how many."""
        jobs, idle_since_s = 0, time.monotonic()
        while not self._stop_requested and jobs != max_jobs:
            link.maintain()
            job = self._next(link, ahead, block=not burst)
            if job is not None:
                self._answer(link, ahead, job)
                jobs, idle_since_s = jobs + 1, time.monotonic()
            elif burst or (max_idle_s is not None and time.monotonic() - idle_since_s >= max_idle_s):
                break
            elif capture := getattr(self._engine, "capture_pending", None):
                with limited(self.settings.stage_limit_s):
                    capture(1)  # graphs for what has been asked since, one at a time, while nobody waits
        all_jobs = jobs + ahead.ended_jobs
        leaving = event("worker_leaves", worker=self.name, jobs=all_jobs)
        log.info("worker leaves name=%s jobs=%d", self.name, all_jobs, extra=leaving)
        return jobs

    def _next(self, link: Link, ahead: Ahead, *, block: bool) -> Ready | Ending | None:
        """The next job, its CPU work done: beside the last one, or now. One that nobody wants is passed over."""
        while not self._stop_requested:
            if (ready := ahead.take()) is not None and self._begin(link, ready.claim):
                return ready._replace(started_s=time.monotonic())
            ahead.settle()
            claim = link.take(block=block)
            if claim is None:
                break
            job = self._prepare(claim)
            is_quick = time.monotonic() - job.started_s < LOOK_AFTER_S
            if isinstance(job, Ending) or is_quick or self._begin(link, claim):
                return job
        return None

    def _begin(self, link: Link, claim: Claim) -> bool:
        """Whether a prepared job may go to the device: it is still ours, not cancelled, and its deadline not passed."""
        if link.begin(claim):
            return True
        self._pulse.in_hand.pop(claim.token)
        return False

    def _answer(self, link: Link, ahead: Ahead, job: Ready | Ending) -> None:
        """One job, from the device to its end."""
        if isinstance(job, Ready):
            with ahead.beside():
                job = self._decide(job)
        if ahead.is_holding() and job.fatal is None:
            ahead.write_beside(job)  # the device need not wait for it
        else:
            ahead.settle()
            self._end(link, job)

    def _prepare(self, claim: Claim) -> Ready | Ending:
        """A job's CPU work. Runs in the main thread or `ahead`'s, never in both at once."""
        engine, started_s = self._loaded_engine, time.monotonic()
        self._pulse.in_hand[claim.token] = claim.job_id

        def prepare() -> Ready:
            request = parse_request(claim.payload)
            self._metrics.asked(len(request.questions))
            prepared = engine.prepare(request.image_bytes, questions_of(request), request.image_media_type)
            return Ready(claim, started_s, request, prepared)

        return self._at_the_border(claim, started_s, prepare)

    def _decide(self, job: Ready) -> Ending:
        """A job's work on the device. Main thread only."""
        engine = self._loaded_engine

        def decide() -> Ending:
            decision = engine.decide_prepared(job.prepared)
            return Ending(job.claim, job.started_s, answered(job.request, decision, engine.identity.name))

        return self._at_the_border(job.claim, job.started_s, decide)

    def _at_the_border(self, claim: Claim, started_s: float, work: Callable[[], T]) -> T | Ending:
        """Do a job's work, or say how it fails. A broad `except` stands here, at the job's border, and nowhere else."""
        try:
            with limited(self.settings.stage_limit_s):
                return work()
        except RequestRefused as error:
            return Ending(claim, started_s, contract_refused(error, claim.payload, self._loaded_engine))
        except Exception as error:
            if faults := refusal_faults(error):
                return Ending(claim, started_s, refused(faults))
            is_fatal = exit_code_of(error) is not None
            # An unexpected error's message stays out of the log: it may repeat a prompt.
            told = f": {error}" if is_fatal else ""
            trace = "".join(traceback.format_tb(error.__traceback__))
            kind = type(error).__name__
            failure = event("job_failed", job_id=claim.job_id, error=kind)
            log.error("job failed id=%s: %s%s\n%s", claim.job_id, kind, told, trace, extra=failure)
            return Ending(claim, started_s, failed(error), error if is_fatal else None)

    def _end(self, link: Link, job: Ending) -> None:
        """Write a job's end. Raises what the process must end with."""
        claim, outcome = job.claim, job.outcome
        run_ms = (time.monotonic() - job.started_s) * 1000
        state = "draining" if self._stop_requested or job.fatal else "ready"
        ended = link.finish(claim, outcome, model=self._loaded_engine.identity.name, state=state, run_ms=run_ms)
        self._pulse.in_hand.pop(claim.token)
        if ended is None:
            lost = event("job_lost", job_id=claim.job_id, attempts=claim.attempts)
            log.warning("job lost id=%s attempts=%d: its lease had ended", claim.job_id, claim.attempts, extra=lost)
        else:
            code = outcome.code if ended.status == outcome.status else ended.status
            stages_ms = ended.stages_ms(outcome)
            self._metrics.ended(ended.status, code, **stages_ms)
            log.info(
                "job ended id=%s status=%s%s queue_ms=%s total_ms=%s attempts=%d",
                claim.job_id, ended.status, f" code={code}" if code else "", ended.queue_ms, ended.total_ms,
                claim.attempts, extra=event("job_ended", job_id=claim.job_id, status=ended.status, code=code,
                                            attempts=claim.attempts, worker=self.name, **stages_ms),
            )  # fmt: skip
            link.seal(claim)  # its caller has the answer and need not wait for this
        if job.fatal:
            raise job.fatal

    @property
    def _loaded_engine(self) -> Engine:
        assert self._engine is not None, "a job is taken only when the engine is ready"
        return self._engine

    def _fail(self, exit_code: int, reason: str) -> None:
        self.exit_code = exit_code
        if exit_code == EXIT_DEVICE and threading.current_thread() is threading.main_thread():
            # The interpreter's end would free what lies on the device, meet its error again and abort.
            atexit.register(_end_process, exit_code)
        self._pulse.state = "failed"
        self._pulse.facts |= {"error": reason[:2000], "progress": ""}
        log.error("worker failed: %s", reason, extra=event("worker_failed", worker=self.name, exit_code=exit_code))

    def _install_signal_handlers(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.request_stop)
            signal.signal(signal.SIGTERM, self.request_stop)

    def stop(self) -> None:
        """Take no more jobs; `work` returns when the one in hand has ended. May be called from any thread."""
        self._stop_requested = True
        if self._is_ready:
            self._pulse.state = "draining"

    def request_stop(self, signum: int, frame: object) -> None:
        """First signal: no new job, finish the one in hand, leave. The next one ends the process at once; its lease
        brings the job back."""
        self.stop()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._is_ready:
            raise Stopped

    def _set_ip_address(self, connection: redis.Redis) -> None:
        """Asks the server nothing: a worker can be constructed while the server is away."""
        self.ip_address = "unknown"

    def subscribe(self) -> None:
        """Nothing: whoever may publish on a channel must not stop a worker."""

    def execute_job(self, job: object, queue: object) -> NoReturn:
        """Never called: `work` is a loop of its own."""
        raise NotImplementedError("GpuWorker runs no RQ job")

    def _start_scheduler(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError("GpuWorker starts no scheduler: it would fork")


def fresh_name() -> str:
    """A worker's name that no other has: the host's and a random part."""
    host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())[:32]
    return f"{host}-{uuid.uuid4().hex[:8]}"


def _end_process(exit_code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)
