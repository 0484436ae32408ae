"""The worker's talk with the server: take, finish, tidy up, and patience while the server is gone.

Every step may be sent again after a lost reply, so each is, with growing pauses, until the server answers or the
patience ends. It knows no request and no engine.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeVar

import redis
import redis.exceptions as redis_errors
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry
from rq.connections import get_connection_kwargs

from producer.limits import MAX_PAYLOAD_BYTES
from producer.scripts import Command, Script, call, seal
from worker.answer import Outcome
from worker.logs import event
from worker.scripts import BEGIN, CLAIM, FINISH, GIVE_BACK, LEAVE, MAINTAIN, PUT_BACK
from worker.settings import Settings, SettingsError

# One blocking pop lasts this long: an idle worker notices within it that it shall stop, or that a lease has ended.
BLOCK_S = 1.0
SOCKET_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 5.0
# A payload of 1 MiB then comes in 4 reads, not 16.
READ_BYTES = 256 * 1024
# Entries of a queue or registry that one script looks at.
SCAN_BUDGET = 512
MAINTENANCE_INTERVAL_S = 10.0
NEWEST_UNSUPPORTED_SERVER = 6
# jemalloc keeps 4 MiB in 5; and there are results, records and the connections' buffers.
PAYLOAD_OVERHEAD = 1.25
OTHER_MEMORY_BYTES = 64 * 2**20

log = logging.getLogger("worker")
T = TypeVar("T")


class ServerLost(Exception):
    """The server stayed away for longer than the patience."""


@dataclass(frozen=True)
class Claim:
    """A job in hand: the lease's `token` is the right to end it. Times are the server's. `sha256` is the payload's, or
    empty if its producer left it out."""

    job_id: str
    token: str
    attempts: int
    queue_ms: float
    enqueued_us: int
    sha256: str
    payload: bytes


class Ended(NamedTuple):
    """How the server wrote a job's end: its status may be `cancelled` instead of what the worker had."""

    status: str
    queue_ms: str
    total_ms: str

    def stages_ms(self, outcome: Outcome) -> dict[str, float | None]:
        """The milliseconds of each stage; None for one that the job never reached."""
        return {
            "queue_ms": _as_ms(self.queue_ms),
            "prepare_ms": outcome.prepare_ms,
            "vision_ms": outcome.vision_ms,
            "language_ms": outcome.language_ms,
            "total_ms": _as_ms(self.total_ms),
        }


class Link:
    """One worker's connection for its jobs. Not shared between threads.

    Args:
        client: from `own_client`.
        name: the worker's name.
        is_stopping: whether the worker shall leave; a wait for the server ends then, unless a job is in hand.
        on_end: told the status and code of a job that the server's scripts ended for us (one whose deadline passed).
    """

    def __init__(
        self,
        client: redis.Redis,
        settings: Settings,
        name: str,
        is_stopping: Callable[[], bool] = lambda: False,
        on_end: Callable[[str, str], None] = lambda status, code: None,
    ) -> None:
        self._redis = client
        self._settings = settings
        self._keys = settings.keys
        self._name = name
        self._is_stopping = is_stopping
        self._on_end = on_end
        self._worker_keys = (self._keys.worker(name), self._keys.rq_worker(name))
        self._tokens = (f"{uuid.uuid4().hex[:16]}-{number}" for number in count(1))
        self._nothing_waits = False
        self._maintained_at_s = float("-inf")

    def check_server(self) -> None:
        """Refuse a server on which jobs could be lost.

        Raises:
            SettingsError: it is too old or a Cluster, evicts keys when its memory is full, or has less memory than a
                full queue needs, so that it would be full before the queue is.
        """
        info = self._patiently("ask the server what it is", lambda: self._redis.info("server", "memory"), must=True)
        version = str(info.get("redis_version", "7"))
        if int(version.split(".")[0]) <= NEWEST_UNSUPPORTED_SERVER:
            raise SettingsError(f"the server is Redis {version}; Redis 7 or newer, or Valkey, is needed")
        if info.get("redis_mode") == "cluster":
            raise SettingsError(
                "the server is part of a Redis Cluster; a queue's keys must lie on one node, but RQ's names have "
                "no hash tag: use one primary, with replicas if you like"
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise SettingsError(
                f"the server's maxmemory-policy is {policy}, which deletes waiting jobs; set it to noeviction"
            )
        needed_bytes = needed_memory_bytes(self._settings.max_waiting_bytes)
        if 0 < (most_bytes := int(info.get("maxmemory", 0))) < needed_bytes:
            raise SettingsError(
                f"the server's maxmemory is {most_bytes:,} bytes; a queue filled to its bound of "
                f"{self._settings.max_waiting_bytes:,} waiting bytes needs {needed_bytes:,}: raise maxmemory, or lower "
                "the producers' max_waiting_bytes and tell the worker with CUA_MAX_WAITING_BYTES"
            )

    def take(self, *, block: bool) -> Claim | None:
        """The next job, or None: at once if `block` is false, after about a second otherwise."""
        nothing_waits, self._nothing_waits = self._nothing_waits, False
        claim = None if block and nothing_waits else self._claim()
        return self._claim(wait_s=BLOCK_S) if claim is None and block else claim

    def take_ahead(self) -> Claim | None:
        """The next job while another one is in hand, at once; None also if an idle worker may have it."""
        if self._is_stopping():
            return None
        waiting = self._patiently("look at the queue", lambda: self._redis.lindex(self._keys.queue, 0))
        return self._claim(is_ahead=True) if waiting else None

    def begin(self, claim: Claim) -> bool:
        """It is the turn of a job that was taken ahead. False if it has ended meanwhile or is no longer ours."""
        command = self._script(BEGIN, claim.job_id, claim.token, self._name, *self._worker_keys)
        notes, verdict = self._patiently(f"begin job {claim.job_id}", lambda: self._run(command), must=True)
        self._take_note(notes)
        if verdict == b"lost":
            log.warning(
                "job lost id=%s: the lease of a job taken ahead had ended", claim.job_id,
                extra=event("job_lost", job_id=claim.job_id, attempts=claim.attempts),
            )  # fmt: skip
        return bool(verdict == b"go")

    def give_back(self, claim: Claim) -> None:
        """Put a job that was taken ahead back to the front of the queue; it counts as never taken."""
        try:
            self._take_note(self._run(self._script(GIVE_BACK, claim.job_id, claim.token)))
        except redis_errors.RedisError as error:
            log.warning("could not give back job %s: %s; its lease brings it back", claim.job_id, error)

    def finish(self, claim: Claim, outcome: Outcome, *, model: str, state: str, run_ms: float) -> Ended | None:
        """End a job and its lease in one step. None if the lease was lost: the job is another worker's, or ended.

        Raises:
            ServerLost: the patience ended; the lease brings the job back.
        """
        spent = (_ms(outcome.prepare_ms), _ms(outcome.vision_ms), _ms(outcome.language_ms))
        result = (str(outcome.status), outcome.body, model, *spent)
        copies = (claim.enqueued_us, claim.attempts, claim.sha256, f"{run_ms:.3f}")
        names = (claim.job_id, claim.token, self._name, *self._worker_keys)
        command = self._script(FINISH, *names, state, *result, *copies)
        what = f"write the result of job {claim.job_id}"
        reply = self._patiently(what, lambda: self._run(command), must=True)
        if reply[0] == b"lost":
            return None
        self._nothing_waits = reply[4] == 0
        return Ended(reply[1].decode(), reply[2].decode(), reply[3].decode())

    def seal(self, claim: Claim) -> None:
        """Add the payload's digest to a job's end if its producer left it out.

        Raises:
            ServerLost: the patience ended.
        """
        if claim.sha256 or not claim.payload:  # an empty payload is one that was gone when it was read
            return
        command = seal(self._keys, claim.job_id, claim.payload)
        self._patiently(f"seal the result of job {claim.job_id}", lambda: self._run(command), must=True)

    def maintain(self) -> None:
        """Every ten seconds: drop what has ended or is malformed. A failed round is only logged."""
        if time.monotonic() - self._maintained_at_s < MAINTENANCE_INTERVAL_S:
            return
        self._maintained_at_s = time.monotonic()
        command = self._script(MAINTAIN, SCAN_BUDGET, self._keys.rq_workers, self._keys.rq_queue_workers)
        try:
            self._take_note(self._run(command))
        except redis_errors.RedisError as error:
            log.warning("maintenance failed: %s", error)

    def leave(self, *, keep: bool) -> None:
        """Take the worker off the lists. `keep` leaves its own key, which says why it failed, until it expires."""
        lists = (self._keys.rq_workers, self._keys.rq_queue_workers)
        command = self._script(LEAVE, self._name, *self._worker_keys, *lists, int(keep))
        try:
            self._run(command)
        except redis_errors.RedisError as error:
            log.warning("could not sign off: %s; the worker's keys expire by themselves", error)

    def _claim(self, *, is_ahead: bool = False, wait_s: float = 0.0) -> Claim | None:
        token = next(self._tokens)
        waits = iter([wait_s])  # when asked again after a lost reply, it does not wait: the job may be ours
        while True:
            reply = self._patiently("take a job", lambda: self._claim_once(token, is_ahead, next(waits, 0.0)))
            if reply is None:
                return None
            (notes, job), payload = reply
            self._take_note(notes)
            if not job:
                return None
            if job[0] != b"again":
                return self._claimed(job, token, payload)

    def _claimed(self, job: list[bytes], token: str, payload: bytes | None) -> Claim | None:
        job_id = job[0].decode()
        if payload is None:
            key = self._keys.payload(job_id)
            payload = self._patiently(f"read job {job_id}", lambda: self._redis.get(key), must=True)
        # A payload that is gone by now reads as an empty one, which the contract refuses.
        return Claim(job_id, token, int(job[1]), float(job[2]), int(job[3]), job[4].decode(), payload or b"")

    def _claim_once(self, token: str, is_ahead: bool, wait_s: float) -> tuple[list[Any], bytes | None]:
        """Block until something was put on the queue, claim, and read the payload: one round trip.

        What wakes is only a hint and may be lost: the queue itself decides, also when nothing woke.
        """
        taken = self._keys.taken(token)
        claim = self._script(
            CLAIM, token, self._name, *self._worker_keys,
            self._settings.lease_s, MAX_PAYLOAD_BYTES, SCAN_BUDGET, self._keys.suspended, int(is_ahead),
        )  # fmt: skip
        put_back = ("EVAL", PUT_BACK.text, 2, self._keys.leases, taken, token, self._keys.payload(""))
        # Not in MULTI: a server out of memory takes no command into one, and none blocks there.
        with self._redis.pipeline(transaction=False) as pipeline:
            if wait_s:
                pipeline.execute_command("BLPOP", self._keys.wake, wait_s)  # type: ignore[no-untyped-call]
            pipeline.execute_command(*claim)  # type: ignore[no-untyped-call]
            pipeline.get(taken)
            pipeline.execute_command(*put_back)  # type: ignore[no-untyped-call]
            *_, reply, payload, _ = replies = pipeline.execute(raise_on_error=False)
        if error := next((one for one in replies if isinstance(one, Exception)), None):
            raise error
        return reply, payload

    def _take_note(self, notes: list[bytes]) -> None:
        for fields in log_notes(notes):
            if fields["event"] == "ended":
                self._on_end(fields["status"], fields["code"])

    def _script(self, script: Script, *args: str | int | float) -> Command:
        return call(script, self._keys, self._settings.policy, *args)

    def _run(self, command: Command) -> Any:
        return self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    def _patiently(self, what: str, action: Callable[[], T], *, must: bool = False) -> Any:
        """Try until the server answers. None if the worker shall stop meanwhile, unless it `must` be done.

        Raises:
            ServerLost: the patience ended.
            SettingsError: the server refuses this user.
        """
        backoff = ExponentialWithJitterBackoff(base=0.1, cap=5.0)
        started_s, complaint = time.monotonic(), ""
        for failures in count(1):
            try:
                value = action()
            except (redis_errors.AuthenticationError, redis_errors.NoPermissionError) as error:
                raise SettingsError(f"the server refuses this user: {error}") from error
            except redis_errors.RedisError as error:
                if complaint != str(error):
                    complaint = str(error)
                    log.warning("cannot %s: %s; trying again", what, complaint)
                if time.monotonic() - started_s > self._settings.patience_s:
                    raise ServerLost(f"could not {what} for {self._settings.patience_s:g} s: {complaint}") from error
            else:
                if complaint:
                    log.info("the server is back after %.1f s", time.monotonic() - started_s)
                return value
            if self._is_stopping() and not must:
                return None
            time.sleep(backoff.compute(failures))
        raise AssertionError("unreachable")


def needed_memory_bytes(waiting_bytes: int) -> int:
    """The least `maxmemory` for a queue with this bound on waiting bytes."""
    return int(waiting_bytes * PAYLOAD_OVERHEAD) + OTHER_MEMORY_BYTES


def own_client(connection: redis.Redis, timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A client to the same server whose commands are never repeated behind our back; its timeout lies above our blocks
    unless another is given."""
    options = get_connection_kwargs(connection) | {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(timeout_s, CONNECT_TIMEOUT_S),
        "decode_responses": False,
        "socket_read_size": READ_BYTES,
    }
    pool = redis.ConnectionPool(connection_class=connection.connection_pool.connection_class, **options)
    return redis.Redis(connection_pool=pool)


def log_notes(notes: list[bytes]) -> list[dict[str, Any]]:
    """What a script did beside its task, one line each; returns the notes' fields."""
    read: list[dict[str, Any]] = [json.loads(note) for note in notes]
    for fields in read:
        line = " ".join(f"{name}={fields[name]}" for name in sorted(fields) if name not in ("event", "id"))
        level = logging.INFO if fields["event"] == "ended" else logging.WARNING
        more = {name: fields[name] for name in fields if name not in ("event", "id")}
        log.log(
            level, "job %s id=%s %s", fields["event"], fields["id"], line,
            extra=event(f"job_{fields['event']}", job_id=fields["id"], **more),
        )  # fmt: skip
    return read


def _as_ms(text: str) -> float | None:
    """What a result's hash says, which a stranger may have written."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
