"""The worker's pulse: a thread that says "still here" and renews the leases of the jobs in hand, on its own connection.

It goes on while the main thread loads a checkpoint or computes. It takes and ends no job.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version

import redis
import redis.exceptions as redis_errors

from producer.scripts import Command, call
from worker.scripts import BEAT
from worker.settings import Settings

SERVING = ""
# How often the thread looks whether something is to be told at once; a beat itself is rarer.
_TICK_S = 0.2

log = logging.getLogger("worker")


@dataclass
class Pulse:
    """What the next beat tells. The worker writes it, field by field; a beat reads it.

    `state` is `verifying`, `loading`, `warming`, `draining`, `failed`, or `SERVING`: the server then knows itself
    whether the worker is busy. `in_hand` maps each lease's token to its job's id: the job that runs, and the one that
    is prepared ahead. `facts` are more fields of the worker's hash.
    """

    state: str = "verifying"
    in_hand: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


class Beat(threading.Thread):
    """Beats every `beat_s` seconds, and soon after the pulse's state has changed."""

    def __init__(self, client: redis.Redis, settings: Settings, name: str, pulse: Pulse) -> None:
        super().__init__(name="beat", daemon=True)
        self._redis = client
        self._settings = settings
        self._worker_name = name
        self._pulse = pulse
        self._stopped = threading.Event()
        self._beating = threading.Lock()
        self._beaten: tuple[str, str] | None = None
        self._due_s = 0.0
        self._complaint = ""
        self._lost: set[str] = set()

    def run(self) -> None:
        """Beat until stopped. Nothing that the server does ends it."""
        while not self._stopped.is_set():
            if time.monotonic() >= self._due_s or self._beaten != self._telling():
                self.beat()
            self._stopped.wait(_TICK_S)

    def stop(self) -> None:
        """End the thread; a beat on its way is waited for shortly."""
        self._stopped.set()
        if self.is_alive():
            self.join(timeout=2.0)

    def beat(self) -> None:
        """One beat, by whichever thread. A failed one is logged once and tried again soon."""
        with self._beating:  # an older beat must not arrive after a newer one
            self._beaten = self._telling()
            self._due_s = time.monotonic() + self._settings.beat_s
            try:
                lost = self._redis.execute_command(*self._command())  # type: ignore[no-untyped-call]
            except redis_errors.RedisError as error:
                self._due_s = time.monotonic() + min(1.0, self._settings.beat_s)
                if self._complaint != str(error):
                    self._complaint = str(error)
                    log.warning("no beat: %s", error)
                return
            self._complaint = ""
            self._warn_once({member.decode().partition(":")[2] for member in lost})

    def _warn_once(self, tokens: set[str]) -> None:
        for token in tokens - self._lost:
            if job_id := self._pulse.in_hand.get(token):
                log.warning("job lease lost id=%s: another worker may have it by now", job_id)
        self._lost = tokens

    def _telling(self) -> tuple[str, str]:
        return self._pulse.state, self._pulse.facts.get("progress", "")

    def _command(self) -> Command:
        keys, settings, pulse = self._settings.keys, self._settings, self._pulse
        ours = [text for pair in {**_facts(), **pulse.facts, "queue": settings.queue}.items() for text in pair]
        rqs = [text for pair in _rq_facts(settings.queue).items() for text in pair]
        in_hand = " ".join(f"{job_id}:{token}" for token, job_id in pulse.in_hand.copy().items())
        names = (keys.worker(self._worker_name), keys.rq_worker(self._worker_name))
        lists = (keys.rq_workers, keys.rq_queue_workers)
        return call(
            BEAT, keys, settings.policy, self._worker_name, *names, *lists,
            settings.lease_s, settings.worker_ttl_s, pulse.state, in_hand, len(ours), *ours, *rqs,
        )  # fmt: skip


def identity_facts(name: str, hashes: dict[str, str]) -> dict[str, str]:
    """The fields that say what answers."""
    return {"model": name, "hashes": json.dumps(hashes)}


def _facts() -> dict[str, str]:
    return {"pid": str(os.getpid()), "host": socket.gethostname()}


def _rq_facts(queue: str) -> dict[str, str]:
    return {
        "queues": queue,
        "pid": str(os.getpid()),
        "hostname": socket.gethostname(),
        "ip_address": "unknown",
        "version": version("rq"),
        "python_version": platform.python_version(),
    }
