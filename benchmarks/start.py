"""How long a start takes at full size, phase by phase: synthesize, export, verify, load, warm up, the first decision.

The checkpoint is synthetic (random weights, the published shapes and layout) and its files are in the page cache when
they are verified and loaded, as on a box that restarts its worker.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine import Engine, Question, open_checkpoint, verify_checkpoint
from engine.checkpoint import ProgressReport
from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.synthesize import synthesize
from engine.warm_up import picture

QUESTION = Question("next", "Keep the changes made on this page.", ("Save", "Discard", "Wait"))


def main() -> int:
    """Run all phases once and print the table; `--out` also writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python -m benchmarks.start --dir /tmp/start --size full --device cuda:0 --out start.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, required=True, help="where the checkpoint goes; removed at the end")
    parser.add_argument("--size", choices=["tiny", "full"], default="full")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="write the table here as Markdown")
    arguments = parser.parse_args()
    phases = Phases()
    try:
        run(arguments.dir, arguments.size, arguments.device, phases)
    finally:
        shutil.rmtree(arguments.dir, ignore_errors=True)
    table = "\n".join([*about(arguments.size, arguments.device), "", *phases.table()])
    print(table)
    if arguments.out:
        arguments.out.write_text(table + "\n")
    return 0


class Phases:
    """Named wall-clock times, and the process's peak memory after each."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, float, float]] = []

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a block."""
        started_s = time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - started_s
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        self._rows.append((name, elapsed_s, peak_gb))

    def table(self) -> list[str]:
        """The rows as Markdown."""
        rows = [f"| {name} | {elapsed_s:.2f} | {peak_gb:.2f} |" for name, elapsed_s, peak_gb in self._rows]
        return ["| phase | s | peak memory of the process so far, GB |", "|---|---|---|", *rows]


def run(root: Path, size: str, device: str, phases: Phases) -> None:
    """Every phase, in the order of a box's life."""
    report = ProgressReport()
    with phases.timed("synthesize"):
        pin = synthesize(root, "full" if size == "full" else "tiny", seed=0, report=report)
    with phases.timed("export (verify both sources, merge, write, hash)"):
        export_checkpoint(root / "base", root / "adapter", root / "export", pin, report)
    paths = open_checkpoint(root)
    with phases.timed("verify alone"):
        verify_checkpoint(paths, report)
    if device.startswith("cuda"):
        with phases.timed("CUDA context"):
            torch.zeros(1, device=device)
    with phases.timed("start: verify and load, side by side"):
        engine = Engine.load(paths, device=device, report=report)
    with phases.timed("start: warm up, first time (kernels are compiled)"):
        engine.warm_up(report)
    with phases.timed("one decision, 1280x800, the first of its size and text"):
        engine.decide(picture(1280, 800), (QUESTION,))
    with phases.timed("one decision again"):
        engine.decide(picture(1280, 800), (QUESTION,))
    del engine
    with phases.timed("second start: verify and load (compiled kernels cached)"):
        engine = Engine.load(paths, device=device, report=report)
    with phases.timed("second start: warm up"):
        engine.warm_up(report)


def about(size: str, device: str) -> list[str]:
    """Where the numbers come from."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"none ({platform.processor() or 'CPU'})"
    return [
        f"# Start at {size} size",
        "",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, GPU {gpu}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}. Random weights in the published shapes and layout.",
    ]


if __name__ == "__main__":
    sys.exit(main())
