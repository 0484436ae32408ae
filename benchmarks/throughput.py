"""`python -m benchmarks.throughput`: how much of the device's time is used when the CPU's work is done beside it.

The worker's engine does the CPU's work of a real one (decode a 1280x800 PNG, hash it, tokenise the question) and then,
for a device, sleeps 25 ms. One producer asks alone, then several at once, each with one job at a time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import redis

from benchmarks import load
from benchmarks.full_size import encoder
from engine import Question
from engine import image as images
from worker.lock import Device
from worker.settings import Settings
from worker.worker import GpuWorker

DEVICE_S = 0.025


class StandInEngine:
    """Answers from the pixels and the tokens, after a pause in place of a device's work."""

    identity = SimpleNamespace(name="stand-in", hashes={})

    def __init__(self) -> None:
        self._encoder = encoder(None)

    def warm_up(self, report: object) -> None:
        """Nothing."""

    def prepare(self, image: bytes, questions: Sequence[Question], media_type: str | None = None) -> Any:
        """The CPU's work."""
        started_s = time.perf_counter()
        digest = sha256(image + images.decode(image, media_type).numpy().tobytes())
        for question in questions:
            digest.update(repr(self._encoder.tail_ids(question)).encode())
        counts = [len(question.labels) for question in questions]
        return digest.digest(), counts, (time.perf_counter() - started_s) * 1e3

    def decide_prepared(self, prepared: Any) -> Any:
        """The device's."""
        digest, counts, prepare_ms = prepared
        started_s = time.perf_counter()
        time.sleep(DEVICE_S)
        probabilities = [[weight / sum(digest[:count]) for weight in digest[:count]] for count in counts]
        timings = SimpleNamespace(
            prepare_ms=prepare_ms, vision_ms=0.0, language_ms=(time.perf_counter() - started_s) * 1e3
        )
        return SimpleNamespace(probabilities=probabilities, input_tokens=1, timings=timings)


class StandInWorker(GpuWorker):
    """`GpuWorker` with that engine."""

    def choose_device(self) -> Device:
        """None."""
        return Device("none", f"a pause of {DEVICE_S * 1e3:g} ms for a GPU", f"none-{os.getpid()}")

    def load_engine(self, device: Device, report: object) -> Any:
        """The engine."""
        return StandInEngine()


def main() -> int:
    """Measure, print the table and write it; 1 if an answer under load differs from the one given alone."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        epilog="example:\n  python -m benchmarks.throughput --out results/",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load.add_options(parser, "throughput-<date>.md")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        settings = Settings.from_environment()
        StandInWorker(settings.queue, connection=redis.Redis.from_url(settings.redis_url), settings=settings).work()
        return 0
    with load.running(["-m", "benchmarks.throughput", "--serve"]) as (connect, facts):
        numbers = load.measure(connect, options.jobs, options.producers, options.seconds)
    table = load.report({**load.about(facts), **numbers}, f"Throughput with {DEVICE_S * 1e3:g} ms for the device")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"throughput-{datetime.now(UTC):%Y-%m-%d}.md").write_text(table + "\n")
    print(table)
    return 0 if numbers["answers_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
