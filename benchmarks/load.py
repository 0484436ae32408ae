"""Producers that ask one job after another, alone or several at once, and what came back when."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from benchmarks.screens import png, screenshot
from producer.client import Client
from producer.result import Result

WIDTH, HEIGHT = 1280, 800
QUESTIONS = {
    "next": {
        "type": "choice",
        "instructions": "Keep the changes that were made to the settings on this page and go back to the list of "
        "accounts. Nothing else may be changed, no dialog may stay open, and the newsletter must not be ordered.",
        "criteria": {
            "save": "Click the Save button at the end of the form",
            "cancel": "Click the Cancel link beside it",
            "menu": "Open the menu in the upper right corner",
            "wait": None,
        },
    }
}


class Asked(NamedTuple):
    """One answered job: which picture it was about, and when it was submitted and answered, `time.perf_counter`."""

    picture: int
    result: Result
    submitted_s: float
    answered_s: float

    @property
    def spent_ms(self) -> float:
        """From submit to result."""
        return (self.answered_s - self.submitted_s) * 1e3


def pictures(count: int) -> list[bytes]:
    """So many different screenshots, as PNG files."""
    return [png(screenshot(WIDTH, HEIGHT, seed)) for seed in range(count)]


def ask(client: Client, images: Sequence[bytes], number: int) -> Asked:
    """One job, waited for.

    Raises:
        SystemExit: it was not answered.
    """
    picture = number % len(images)
    submitted_s = time.perf_counter()
    result = client.decide(images[picture], QUESTIONS)
    asked = Asked(picture, result, submitted_s, time.perf_counter())
    if not result.ok:
        raise SystemExit(f"a job was not answered: {result.status} {result.error}")
    return asked


def alone(connect: Callable[[], Client], images: Sequence[bytes], jobs: int) -> list[Asked]:
    """One producer."""
    with connect() as client:
        return [ask(client, images, number) for number in range(jobs)]


def together(connect: Callable[[], Client], images: Sequence[bytes], producers: int, seconds: float) -> list[Asked]:
    """So many producers for so long, each with one job at a time; in the order of the answers."""
    end_s = time.perf_counter() + seconds

    def produce(first: int) -> list[Asked]:
        asked: list[Asked] = []
        with connect() as client:
            while time.perf_counter() < end_s:
                asked.append(ask(client, images, first + len(asked) * producers))
        return asked

    with ThreadPoolExecutor(producers) as pool:
        found = [asked for part in pool.map(produce, range(producers)) for asked in part]
    return sorted(found, key=lambda asked: asked.answered_s)


def rate_per_s(asked: Sequence[Asked], producers: int) -> float:
    """Answers a second while all the producers were there: without each one's first and last."""
    ends_s = [one.answered_s for one in asked[producers:-producers]]
    return (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80."""
    tenths = statistics.quantiles(values, n=10)
    return {name: round(tenths[at], 3) for name, at in (("p20", 1), ("p50", 4), ("p80", 7))}


def same_answers(one: Sequence[Asked], other: Sequence[Asked]) -> bool:
    """Whether every picture has one answer, byte for byte, wherever it was asked about."""
    bodies: dict[int, set[str]] = {}
    for asked in (*one, *other):
        bodies.setdefault(asked.picture, set()).add(asked.result.body)
    return all(len(found) == 1 for found in bodies.values())


def gpu_ms(asked: Asked) -> float:
    """The time on the device that the result tells."""
    timings: Any = asked.result.timings
    return float(timings.vision_ms + timings.language_ms)
