"""What a client says to the server and makes of its replies, without saying it: `Client` and `AsyncClient` share this.

Each operation is a generator that yields `Batch`es (commands to run) and `Pause`s and is sent the replies. Every batch
may be repeated after a lost connection: a submission is recognised by its id and bytes, the rest only asks.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar

import redis.exceptions as redis_errors
from redis.backoff import ExponentialWithJitterBackoff

from producer.contract import QUESTION_TYPE, build_payload
from producer.errors import (
    Code,
    DuplicateId,
    Fault,
    MalformedResult,
    ProducerError,
    QueueFull,
    RequestRefused,
    ResultTimeout,
    ServerUnavailable,
    UnknownJob,
    shown,
)
from producer.keys import JOB_ID_PATTERN, Keys
from producer.limits import MAX_WAITING_BYTES, MAX_WAITING_JOBS
from producer.result import Result
from producer.screenshot import ImageInput, file_faults, file_of
from producer.scripts import CANCEL, MAX_RECENT, RECENT, SETTLE, SUBMIT, Command, Policy, Script, call, seal

DEFAULT_DEADLINE_S = 60.0
MAX_DEADLINE_S = 86_400.0
DEFAULT_RESULT_TIMEOUT_S = 60.0
DEFAULT_RECENT = 20
_EPOCH = datetime.fromtimestamp(0, UTC)
# `decide` waits this much past the deadline: a job taken in its last moment is still answered.
DECIDE_GRACE_S = 30.0
# One blocking read lasts at most this long, so that a silent server is noticed; the socket's timeout lies above it.
MAX_BLOCK_S = 10.0
SOCKET_TIMEOUT_S = MAX_BLOCK_S + 5.0
CONNECT_TIMEOUT_S = 5.0
# The server's clock and ours run apart; asking this much later than told makes "not yet" rare.
SETTLE_MARGIN_S = 0.02
# A staged payload lives only inside its transaction; this is for a server that dies in it.
STAGED_TTL_MS = 60_000
# The digest of a job that was sent without one is there just after its result; for so long, so often, it is waited for.
UNSEALED_S = 1.0
UNSEALED_POLL_S = 0.02
_TRANSIENT = (redis_errors.ConnectionError, redis_errors.TimeoutError, redis_errors.ReadOnlyError)

Questions: TypeAlias = Mapping[str, Mapping[str, object]]
T = TypeVar("T")


class Batch(NamedTuple):
    """Commands for one round trip; their replies are sent back as a list. `is_atomic`: inside MULTI and EXEC."""

    commands: tuple[Command, ...]
    is_atomic: bool = False


class Pause(NamedTuple):
    """Wait; an empty list is sent back."""

    seconds: float


class Job(NamedTuple):
    """One job of `submit_many`; the fields are the arguments of `Client.submit`."""

    image: ImageInput
    questions: Questions
    job_id: str | None = None
    deadline_s: float = DEFAULT_DEADLINE_S


class Packed(NamedTuple):
    """A checked job, ready to be sent."""

    payload: bytes
    job_id: str
    deadline_s: float


Steps: TypeAlias = Generator[Batch | Pause, list[Any], T]


class Submitted(NamedTuple):
    """A job that the server holds; `deadline_in_s` from now."""

    job_id: str
    deadline_in_s: float


@dataclass(frozen=True)
class Protocol:
    """The operations on one queue.

    `max_waiting_jobs` and `max_waiting_bytes` bound what waits; a submission over either is refused with `QueueFull`.
    For `reconnect_s` submitting and cancelling try to reach the server; a wait for a result, until its own timeout.
    """

    keys: Keys = field(default_factory=Keys)
    policy: Policy = field(default_factory=Policy)
    max_waiting_jobs: int = MAX_WAITING_JOBS
    max_waiting_bytes: int = MAX_WAITING_BYTES
    reconnect_s: float = 5.0

    def submit(
        self,
        payload: bytes,
        job_id: str | None,
        deadline_s: float,
        nonce: str | None = None,
        give_up_at: float = math.inf,
        *,
        is_sealed: bool = True,
    ) -> Steps[Submitted]:
        """Put a payload on the queue, once however often it is repeated. The nonce names this very submission.

        Unless `is_sealed`, the payload's digest is left out: the worker that reads it makes one. That is for a fresh
        id which nobody is told before the end; the nonce knows such a submission again.

        Raises:
            DuplicateId, QueueFull, RequestRefused (a malformed id).
        """
        checked_deadline(deadline_s)
        job_id = fresh_id() if job_id is None else checked_id(job_id)
        sha256 = hashlib.sha256(payload).hexdigest() if is_sealed else ""
        batch = self._submission(payload, sha256, job_id, deadline_s, nonce or fresh_id())
        ask_until, unsealed_until = time.monotonic() + self.reconnect_s, time.monotonic() + UNSEALED_S
        try:
            while True:
                reply = (yield from _ask(batch, min(give_up_at, ask_until)))[-1]
                if reply[0] != b"unsealed" or time.monotonic() > min(give_up_at, unsealed_until):
                    break
                yield Pause(UNSEALED_POLL_S)
        except redis_errors.OutOfMemoryError:
            raise QueueFull("the server's memory is full", retry_after_s=1.0) from None
        match reply[0]:
            case b"queued" | b"same":
                return Submitted(job_id, reply[1] / 1000)
            case b"duplicate" | b"unsealed":
                raise DuplicateId(job_id)
        detail = f"{reply[2]} jobs with {reply[3]:,} bytes wait on queue {self.keys.queue_name}"
        raise QueueFull(detail, retry_after_s=reply[1] / 1000)

    def submit_many(self, jobs: Sequence[Packed]) -> Steps[list[str]]:
        """Put all of them on the queue, or none: what was queued before one is refused is taken back.

        Raises:
            DuplicateId, QueueFull.
        """
        nonce = fresh_id()
        try:
            for job in jobs:
                yield from self.submit(job.payload, job.job_id, job.deadline_s, nonce)
        except (GeneratorExit, redis_errors.RedisError):
            raise  # nobody to tell
        except BaseException:
            yield Batch(tuple(self._script(CANCEL, job.job_id, nonce) for job in jobs))
            raise
        return [job.job_id for job in jobs]

    def result(self, job_id: str, timeout_s: float) -> Steps[Result]:
        """Wait for a job's end.

        Raises:
            UnknownJob (at once), ResultTimeout, RequestRefused (a malformed id).
        """
        return self._wait(checked_id(job_id), timeout_s, time.monotonic() + timeout_s)

    def results(self, job_ids: Sequence[str], timeout_s: float) -> Steps[list[Result]]:
        """Wait for the end of all of them, one timeout over all; in the order given. Raises as `result`."""
        give_up_at = time.monotonic() + timeout_s
        found: list[Result] = []
        for job_id in [checked_id(job_id) for job_id in job_ids]:
            found += [(yield from self._wait(job_id, timeout_s, give_up_at))]
        return found

    def decide(self, payload: bytes, job_id: str | None, deadline_s: float, timeout_s: float | None) -> Steps[Result]:
        """Submit and wait, one timeout over both. Giving up takes the job back, unless it was somebody else's."""
        is_sealed = job_id is not None
        job_id, nonce = fresh_id() if job_id is None else checked_id(job_id), fresh_id()
        timeout_s = deadline_s + DECIDE_GRACE_S if timeout_s is None else timeout_s
        give_up_at = time.monotonic() + timeout_s
        try:
            job = yield from self.submit(payload, job_id, deadline_s, nonce, give_up_at, is_sealed=is_sealed)
            block_s = job.deadline_in_s + SETTLE_MARGIN_S
            result = yield from self._wait(job_id, timeout_s, give_up_at, block_s)
        except (GeneratorExit, redis_errors.RedisError, DuplicateId, QueueFull, ValueError):
            raise  # nothing to take back, or nobody to tell
        except BaseException:
            # Also an interrupt or a cancelled task, which may come when the server has the job and we not yet its word.
            sealing = () if is_sealed else (seal(self.keys, job_id, payload),)
            yield Batch((self._script(CANCEL, job_id, nonce), *sealing))
            raise
        if not (is_sealed or result.ok):  # perhaps no worker has read the payload
            with contextlib.suppress(redis_errors.RedisError):
                yield Batch((seal(self.keys, job_id, payload),))
        return result

    def cancel(self, job_id: str) -> Steps[bool]:
        """Take a job back: True if it ended as cancelled or will, False if it had ended before.

        Raises:
            UnknownJob, RequestRefused (a malformed id).
        """
        batch = Batch((self._script(CANCEL, checked_id(job_id), ""),))
        state = (yield from _ask(batch, time.monotonic() + self.reconnect_s))[0][0]
        if state == b"unknown":
            raise UnknownJob(job_id)
        return bool(state != b"ended")

    def recent(self, most: int, after: datetime | None) -> Steps[list[Result]]:
        """The results of the jobs that ended last, newest first. What is no result is left out.

        Raises:
            ValueError: `most` is not 1 to 1000, or `after` has no time zone.
        """
        after_us = (checked_moment(after) - _EPOCH) // timedelta(microseconds=1) if after else 0
        batch = Batch((self._script(RECENT, checked_count(most), after_us),))
        give_up_at = time.monotonic() + self.reconnect_s
        ids = [job_id.decode() for job_id in (yield from _ask(batch, give_up_at))[0]]
        if not ids:
            return []
        batch = Batch(tuple(("HGETALL", self.keys.result(job_id)) for job_id in ids))
        hashes = yield from _ask(batch, give_up_at)
        results = []
        for job_id, fields in zip(ids, hashes, strict=True):
            with contextlib.suppress(MalformedResult):
                results.append(Result.from_hash(job_id, fields))
        return results

    def _wait(self, job_id: str, timeout_s: float, give_up_at: float, block_s: float = 0.0) -> Steps[Result]:
        seen = b"0-0"
        while True:
            if block_s > 0:
                # A millisecond, the least that can be asked for, when submitting took all the time.
                block_s = max(0.001, min(block_s, give_up_at - time.monotonic(), MAX_BLOCK_S))
                # The second command is answered when the first one wakes: one round trip for both.
                entries, fields = yield from _ask(self._blocking_read(job_id, seen, block_s), give_up_at)
                seen = _last_entry_id(entries) or seen
            else:
                (state, wait_ms), fields = yield from _ask(self._settling(job_id), give_up_at)
            if fields:
                return Result.from_hash(job_id, fields)
            if block_s <= 0:
                if state == b"unknown":
                    raise UnknownJob(job_id)
                block_s = wait_ms / 1000 + SETTLE_MARGIN_S
            else:
                block_s = 0.0
            if time.monotonic() >= give_up_at:
                raise ResultTimeout(job_id, timeout_s)

    def _submission(self, payload: bytes, sha256: str, job_id: str, deadline_s: float, nonce: str) -> Batch:
        staged = self.keys.staged(nonce)
        submit = self._script(
            SUBMIT,
            job_id,
            sha256,
            len(payload),
            max(1, round(deadline_s * 1000)),
            nonce,
            staged,
            self.max_waiting_jobs,
            self.max_waiting_bytes,
        )
        return Batch((("SET", staged, payload, "PX", STAGED_TTL_MS), submit), is_atomic=True)

    def _settling(self, job_id: str) -> Batch:
        return Batch((self._script(SETTLE, job_id), ("HGETALL", self.keys.result(job_id))))

    def _blocking_read(self, job_id: str, seen: bytes, block_s: float) -> Batch:
        block_ms = max(1, round(block_s * 1000))
        read = ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", self.keys.stream(job_id), seen)
        return Batch((read, ("HGETALL", self.keys.result(job_id))))

    def _script(self, script: Script, *args: str | int) -> Command:
        return call(script, self.keys, self.policy, *args)


def fresh_id() -> str:
    """An id that nobody else has."""
    return uuid.uuid4().hex


def checked_id(job_id: str) -> str:
    """The id, if it is one.

    Raises:
        RequestRefused: it is not 1-64 letters, digits, `_` or `-`.
    """
    if not isinstance(job_id, str) or not JOB_ID_PATTERN.fullmatch(job_id):
        sentence = f"the id is {shown(str(job_id))}; 1-64 letters, digits, '_' or '-' are allowed"
        raise RequestRefused([Fault("job_id", sentence, Code.INVALID_REQUEST)])
    return job_id


def checked_deadline(deadline_s: float) -> float:
    """The deadline, if it is one.

    Raises:
        ValueError: it is not more than 0 and at most a day.
    """
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise ValueError(f"deadline_s is {deadline_s:g}: more than 0 and at most {MAX_DEADLINE_S:g} s are allowed")
    return deadline_s


def checked_count(most: int) -> int:
    """How many recent results are asked for, if so many are listed.

    Raises:
        ValueError: it is not 1 to 1000.
    """
    if not 0 < most <= MAX_RECENT:
        raise ValueError(f"most is {most}: 1 to {MAX_RECENT} results are allowed")
    return most


def checked_moment(moment: datetime) -> datetime:
    """The moment, if it is one.

    Raises:
        ValueError: it has no time zone.
    """
    if moment.tzinfo is None:
        raise ValueError(f"the time {moment} has no time zone; give it one, as Result.finished_at has")
    return moment


def packed_jobs(jobs: Iterable[Job]) -> list[Packed]:
    """Jobs ready to be sent, all of them checked.

    Raises:
        RequestRefused: some break the contract; all faults are named, those of the third job under `jobs.2`.
        ValueError, OSError: as for one job.
    """
    packed, faults = [], []
    for index, job in enumerate(jobs):
        try:
            job_id = fresh_id() if job.job_id is None else checked_id(job.job_id)
            packed.append(Packed(payload_of(job.image, job.questions), job_id, checked_deadline(job.deadline_s)))
        except RequestRefused as refusal:
            faults += [fault._replace(loc=f"jobs.{index}.{fault.loc}") for fault in refusal.errors]
    if faults:
        raise RequestRefused(faults)
    return packed


def payload_of(image: ImageInput, questions: Questions) -> bytes:
    """A job's payload from what a caller has.

    Args:
        image: a PNG or JPEG file's bytes, a path to one, a data URL, or a PIL image (which is encoded as PNG).
        questions: by name, maps with `instructions` and `criteria`; `type` may be left out.

    Raises:
        RequestRefused: the request breaks the contract, or the picture is too large; all faults are named.
        OSError: the file cannot be read.
    """
    file = file_of(image)
    faults = file_faults(file)
    try:
        payload = build_payload(file, _with_types(questions) if isinstance(questions, Mapping) else questions)
    except RequestRefused as refusal:
        raise RequestRefused((*faults, *refusal.errors)) if faults else refusal from None
    if faults:
        raise RequestRefused(faults)
    return payload


def outside_error(error: redis_errors.RedisError, where: str) -> ProducerError:
    """What a caller is told when the server could not be asked; `where` names it without its password."""
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.NoPermissionError):
        return ServerUnavailable(f"the Redis server at {where} refuses this user: {error}")
    if isinstance(error, _TRANSIENT):
        return ServerUnavailable(f"the Redis server at {where} cannot be reached: {error}; is it running?")
    return ServerUnavailable(f"the Redis server at {where} refuses to serve: {error}")


def _ask(batch: Batch, give_up_at: float) -> Steps[list[Any]]:
    """Run a batch, again after a lost connection, until the time (on the monotonic clock) is up."""
    backoff = ExponentialWithJitterBackoff(base=0.05, cap=2.0)
    failures = 0
    while True:
        try:
            return (yield batch)
        except _TRANSIENT as error:
            failures += 1
            pause_s = backoff.compute(failures)
            if isinstance(error, redis_errors.AuthenticationError) or time.monotonic() + pause_s > give_up_at:
                raise
        yield Pause(pause_s)


def _last_entry_id(entries: Any) -> bytes | None:
    """The id of the one entry that XREAD gave, in either protocol version's shape; None when it gave none."""
    if not entries:
        return None
    streams = list(entries.values()) if isinstance(entries, dict) else [entry for _, entry in entries]
    found = streams[0]
    while isinstance(found, list):
        if not found:
            return None
        found = found[0]
    entry_id = found[0] if isinstance(found, tuple) else found
    return entry_id if isinstance(entry_id, bytes) else None


def _with_types(questions: Mapping[str, object]) -> Mapping[str, object]:
    return {
        name: {"type": QUESTION_TYPE, **question} if isinstance(question, Mapping) else question
        for name, question in questions.items()
    }
