"""`make soak`: many jobs through one worker, and whether anything grows: its memory, its files, the server's keys.

The limits stand here, written before the first run. The exit code is 1 if one was passed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.synthesize import synthesize
from tests.faults.faults import APPEND_ONLY, DATA_DIR
from tests.faults.report import replace_section, table
from tests.servers import IMAGE, QUESTIONS, ROOT, OwnServer, Place, server_binary, wait_until

REPORT = ROOT / "docs" / "drills.md"
SCREENSHOT = ROOT / "examples" / "pages" / "switch-off.png"
JOBS_WITHOUT_A_MODEL, JOBS_WITH_ONE = 20_000, 1_000
CLIENTS = 4
RESULT_TTL_S = 5
# How much more there may be at the end than after a tenth of the jobs.
MORE_RSS_MIB, MORE_FILES, MORE_SERVER_MIB = 16.0, 0, 8.0
# Keys that stay when the last result has expired: the queue's own, the worker's.
MOST_KEYS_LEFT = 12


@dataclass(frozen=True)
class Sizes:
    """A worker and its server at one moment."""

    rss_mib: float
    files: int
    server_mib: float

    @classmethod
    def of(cls, pid: int, place: Place) -> Sizes:
        status = Path(f"/proc/{pid}/status").read_text()
        rss_kib = int(status.split("VmRSS:")[1].split()[0])
        used_bytes = int(place.redis.info("memory")["used_memory"])
        return cls(rss_kib / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())), used_bytes / 2**20)


@dataclass(frozen=True)
class Soak:
    """What came of one."""

    name: str
    jobs: int
    answered: int
    seconds: float
    early: Sizes
    late: Sizes
    keys_left: int

    @property
    def passed(self) -> bool:
        """Everything answered, nothing grown."""
        return (
            self.answered == self.jobs
            and self.late.rss_mib - self.early.rss_mib <= MORE_RSS_MIB
            and self.late.files - self.early.files <= MORE_FILES
            and self.late.server_mib - self.early.server_mib <= MORE_SERVER_MIB
            and self.keys_left <= MOST_KEYS_LEFT
        )


def soak(name: str, jobs: int, command: tuple[str, ...], image: bytes, **changes: object) -> Soak:
    """Send jobs from a few clients, each waiting for its answer, to one worker."""
    with server() as own, tempfile.TemporaryDirectory() as folder:
        place = Place(own.url, Path(folder), changes={"result_ttl_s": RESULT_TTL_S, **changes})
        with place.process(*command) as process:
            drain(process.stdout)
            began_s = time.monotonic()
            answered = send(place, jobs // 10, image)
            early = Sizes.of(process.pid, place)
            answered += send(place, jobs - jobs // 10, image)
            seconds, late = time.monotonic() - began_s, Sizes.of(process.pid, place)
            with contextlib.suppress(AssertionError):  # the row says how many are left
                wait_until(lambda: int(place.redis.dbsize()) <= MOST_KEYS_LEFT, "results to expire", 60)
            return Soak(name, jobs, answered, seconds, early, late, int(place.redis.dbsize()))


def send(place: Place, jobs: int, image: bytes) -> int:
    """How many were answered."""

    def some(number: int) -> int:
        with place.client() as client:
            return sum(client.decide(image, QUESTIONS).ok for _ in range(number, jobs, CLIENTS))

    with ThreadPoolExecutor(CLIENTS) as pool:
        return sum(pool.map(some, range(CLIENTS)))


def drain(stream: object) -> None:
    """Read a worker's log away: a pipe that fills up would stop it."""
    threading.Thread(target=lambda: [None for _ in stream], daemon=True).start()  # type: ignore[attr-defined]


@contextlib.contextmanager
def server() -> Iterator[OwnServer]:
    with tempfile.TemporaryDirectory(dir=DATA_DIR) as folder:
        own = OwnServer(Path(folder), server_binary(), options=APPEND_ONLY)
        own.start()
        try:
            yield own
        finally:
            own.kill()


def main() -> int:
    """Run both, write the report; the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tiny"
        pin = synthesize(root, "tiny", seed=0)
        export_checkpoint(root / "base", root / "adapter", root / "export", pin)
        runs = [soak("no model", JOBS_WITHOUT_A_MODEL, (), IMAGE)]
        print(runs[-1], flush=True)
        worker = ("-m", "worker", "run", "--name", "w")
        picture = SCREENSHOT.read_bytes()
        runs.append(
            soak("tiny synthetic checkpoint, CPU", JOBS_WITH_ONE, worker, picture, checkpoint=str(root), device="cpu")
        )
        print(runs[-1], flush=True)
    replace_section(REPORT, "soak", report(runs))
    return 0 if all(run.passed for run in runs) else 1


def report(runs: list[Soak]) -> str:
    """The report's section."""
    rows = list(map(cells, runs))
    header = ("engine", "answered", "s", "worker's RSS, MiB", "open files", "server's memory, MiB", "keys left", "")
    return (
        f"`make soak` on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}: {CLIENTS} clients, one worker, results kept {RESULT_TTL_S} s. Each pair is "
        f"after a tenth of the jobs and at the end; allowed are {MORE_RSS_MIB:g} MiB, {MORE_FILES} files and "
        f"{MORE_SERVER_MIB:g} MiB more, and {MOST_KEYS_LEFT} keys when the last result has expired.\n\n"
        f"{table(header, rows)}"
    )


def cells(run: Soak) -> tuple[object, ...]:
    """A row of the table."""
    early, late = run.early, run.late
    pairs = (
        f"{early.rss_mib:.1f} -> {late.rss_mib:.1f}",
        f"{early.files} -> {late.files}",
        f"{early.server_mib:.1f} -> {late.server_mib:.1f}",
    )
    answered = f"{run.answered:,} of {run.jobs:,}"
    return (run.name, answered, f"{run.seconds:.0f}", *pairs, run.keys_left, "ok" if run.passed else "**failed**")


if __name__ == "__main__":
    sys.exit(main())
