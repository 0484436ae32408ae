"""Keeps workers running: one child process a device, started again when it dies and killed when it hangs.

The parent takes no job, touches no device and loads no torch, so it outlives what ends a worker. It learns of a child
from its process and from its beat on the server. When a child is dead it says so there at once: the child's job need
not wait for its lease to end.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import redis.exceptions as redis_errors
from redis.backoff import ExponentialWithJitterBackoff
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT

from producer.scripts import call
from producer.server_url import connect_once
from worker.link import log_notes
from worker.logs import set_up
from worker.queue_facts import SERVING_STATES
from worker.scripts import BURY
from worker.settings import DEVICE_PATTERN, Settings, SettingsError
from worker.worker import NAME_PATTERN

# A restart cures none of these: left as asked, wrong settings, the wrong checkpoint.
FINAL_CODES = (0, 2, 3)
MAX_FAILED_STARTS = 5
MAX_PAUSE_S = 60.0
POLL_S = 0.1
SERVER_TIMEOUT_S = 2.0
LIST_TIMEOUT_S = 120.0

log = logging.getLogger("worker")


class Seen(NamedTuple):
    """A child as the server knows it: the time of its last beat, None before the first, and its state."""

    beat: float | None
    state: str


class Register:
    """What the server knows of workers. No method raises: a supervisor goes on while the server is away."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys = settings.keys
        self._redis = connect_once(settings.redis_url, SERVER_TIMEOUT_S, decode_responses=True)

    def look(self, name: str) -> Seen | None:
        """A worker, or None if the server does not answer."""
        try:
            with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.zscore(self._keys.workers, name)
                pipeline.hget(self._keys.worker(name), "state")
                beat, state = pipeline.execute()
        except redis_errors.RedisError:
            return None
        return Seen(beat, state or "")

    def bury(self, name: str, why: str) -> bool:
        """A worker's process is gone: give its jobs to the others now. Returns whether it is known to have been ready
        for jobs."""
        keys = self._keys
        command = call(
            BURY, keys, self._settings.policy, name, keys.worker(name), keys.rq_worker(name), keys.rq_workers,
            keys.rq_queue_workers, why, self._settings.worker_ttl_s,
        )  # fmt: skip
        try:
            notes, was_ready = self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        except redis_errors.RedisError as error:
            log.warning("could not free the job of worker %s: %s; its lease ends by itself", name, error)
            return False
        log_notes(notes)
        return bool(was_ready)


class Child:
    """One worker process, as seen from outside."""

    def __init__(self, command: Sequence[str], name: str, settings: Settings) -> None:
        self.name = name
        self.started_s = time.monotonic()
        self.was_ready = False
        self.why_killed = ""
        self._settings = settings
        self._beat: float | None = None
        self._heard_s = self.started_s
        # A process group of its own: Ctrl-C in a terminal reaches the parent alone. The pipe tells it of our end.
        self._process = subprocess.Popen(  # noqa: S603  (our own module)
            [*command, "--name", name, "--leave-at-eof"],
            env={**os.environ, **settings.to_environment()},
            stdin=subprocess.PIPE,
            process_group=0,
        )

    def poll(self) -> int | None:
        """Its exit code once it is gone; negative for a signal."""
        return self._process.poll()

    def ask_to_leave(self) -> None:
        """Let it finish its job."""
        self._process.terminate()

    def kill(self, why: str) -> None:
        """End it now."""
        if not self.why_killed:
            log.error("worker %s is killed: %s", self.name, why)
        self.why_killed = self.why_killed or why
        self._process.kill()

    def hear(self, seen: Seen | None) -> None:
        """Take notice of its beat; kill it if there was none for too long. A server that is away proves nothing."""
        now_s = time.monotonic()
        if seen is None or seen.beat != self._beat:
            self._heard_s = now_s
        if seen is not None:
            self._beat = seen.beat
            self.was_ready |= seen.state in SERVING_STATES
        limit_s = self._settings.start_limit_s if self._beat is None else self._settings.stall_limit_s
        if now_s - self._heard_s > limit_s:
            self.kill(f"no beat for {limit_s:g} s")

    def close(self) -> None:
        """Forget the process, which is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()


class Post:
    """One device and the children that serve it, one after another. `exit_code` is None while one shall.

    Args:
        command: starts a worker; its name and settings are added.
        name: the children's, each with a number behind it.
        settings: the children's, their device included.
    """

    def __init__(self, command: Sequence[str], name: str, settings: Settings, register: Register) -> None:
        self.exit_code: int | None = None
        self._command = command
        self._name = name
        self._settings = settings
        self._register = register
        self._backoff = ExponentialWithJitterBackoff(base=settings.restart_pause_s, cap=MAX_PAUSE_S)
        self._child: Child | None = None
        self._generation = self._deaths = self._failed_starts = 0
        self._start_at_s = self._look_at_s = 0.0
        self._stop_asked_s: float | None = None

    def step(self) -> None:
        """Do what is due."""
        now_s = time.monotonic()
        if self.exit_code is not None:
            return
        if self._child is None:
            if now_s >= self._start_at_s:
                self._start()
        elif (code := self._child.poll()) is not None:
            self._ended(self._child, code)
        else:
            self._watch(self._child, now_s)

    def stop(self, *, now: bool) -> None:
        """Let the child finish its job and start no other; `now` ends it at once."""
        if self._child is None:
            self.exit_code = 0 if self.exit_code is None else self.exit_code
        elif now:
            self._child.kill("asked to leave twice")
        elif self._stop_asked_s is None:
            self._stop_asked_s = time.monotonic()
            self._child.ask_to_leave()

    def _start(self) -> None:
        self._generation += 1
        self._child = Child(self._command, f"{self._name}-{self._generation}", self._settings)

    def _watch(self, child: Child, now_s: float) -> None:
        if self._stop_asked_s is not None and now_s - self._stop_asked_s > self._settings.stop_limit_s:
            child.kill(f"asked to leave {self._settings.stop_limit_s:g} s ago")
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + self._settings.beat_s / 2
            child.hear(self._register.look(child.name))

    def _ended(self, child: Child, code: int) -> None:
        self._child = None
        child.close()
        if code == 0 or (code == -signal.SIGTERM and self._stop_asked_s is not None):  # before it could handle it
            self.exit_code = 0
            return
        why = child.why_killed or (f"exit code {code}" if code > 0 else signal.Signals(-code).name)
        was_ready = self._register.bury(child.name, f"its process ended: {why}") or child.was_ready
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        self._deaths = 1 if time.monotonic() - child.started_s > MAX_PAUSE_S else self._deaths + 1
        if self._stop_asked_s is not None or code in FINAL_CODES or self._failed_starts == MAX_FAILED_STARTS:
            self.exit_code = code if code > 0 else 128 - code
            log.error("worker %s ended (%s) and is not started again", child.name, why)
            return
        pause_s = self._backoff.compute(self._deaths)
        self._start_at_s = time.monotonic() + pause_s
        log.error("worker %s ended (%s); the next one starts in %.1f s", child.name, why, pause_s)


class Supervisor:
    """Workers, one a device, until a signal or until none can be kept running.

    Args:
        command: starts one worker, `[python, -m, worker, run]` with options.
        name: what the workers' names begin with.
        settings: the workers' own.
        devices: one worker each; several workers' names hold their device's.

    Raises:
        SettingsError: the name is too long or not allowed.
    """

    def __init__(self, command: Sequence[str], name: str, settings: Settings, devices: Sequence[str]) -> None:
        self._settings = settings
        register = Register(settings)
        names = [f"{name}-{device.replace(':', '')}" for device in devices] if len(devices) > 1 else [name]
        for worker_name in names:
            if not NAME_PATTERN.fullmatch(f"{worker_name}-99999"):
                raise SettingsError(f"worker name {name!r}: letters, digits, '_', '.' or '-', at most 48, are allowed")
        self._posts = [
            Post(command, worker_name, replace(settings, device=device, metrics_port=port), register)
            for worker_name, device, port in zip(names, devices, metrics_ports(settings, len(devices)), strict=True)
        ]
        self._signals = 0

    def run(self) -> int:
        """Supervise until every worker has left for good; returns the exit code of the first that did not as asked."""
        set_up(self._settings, "INFO", DEFAULT_LOGGING_DATE_FORMAT)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.request_stop)
            signal.signal(signal.SIGTERM, self.request_stop)
        while posts := [post for post in self._posts if post.exit_code is None]:
            for post in posts:
                if self._signals:
                    post.stop(now=self._signals > 1)
                post.step()
            time.sleep(POLL_S)
        return next((post.exit_code for post in self._posts if post.exit_code), 0)

    def request_stop(self, signum: int, frame: object) -> None:
        """First signal: every worker finishes its job and leaves. The next one kills them."""
        self._signals += 1


def metrics_ports(settings: Settings, workers: int) -> list[int]:
    """Each worker's own port for metrics: the setting, and those that follow it."""
    return [settings.metrics_port + number if settings.metrics_port else 0 for number in range(workers)]


def devices_of(text: str, list_all: Callable[[], list[str]]) -> list[str]:
    """The devices that `--devices` names: `all`, or some by name.

    Raises:
        SettingsError: one is not allowed, or is named twice.
    """
    names = list_all() if text == "all" else [name.strip() for name in text.split(",")]
    wrong = [name for name in names if not name or not DEVICE_PATTERN.fullmatch(name) or names.count(name) > 1]
    if wrong:
        raise SettingsError(
            f"--devices is {text!r}; `all`, or cuda:<index> and cpu, each once and separated by commas, are allowed; "
            f"not allowed here: {', '.join(map(repr, dict.fromkeys(wrong)))}"
        )
    return names


def list_devices() -> list[str]:
    """Every GPU of this machine, or the CPU if there is none; a process of its own looks, for that needs torch.

    Raises:
        SettingsError: torch is missing or cannot say.
    """
    command = [sys.executable, "-c", "from worker.loading import device_names; print(*device_names())"]
    try:
        done = subprocess.run(  # noqa: S603  (our own module)
            command, capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=True
        )
    except subprocess.SubprocessError as error:
        last_line = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        raise SettingsError(f"--devices all: the devices cannot be listed ({last_line}); name them instead") from error
    return done.stdout.split()
