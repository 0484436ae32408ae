"""`python -m benchmarks.queue`: from submit to result with an engine that does nothing, beside raw Redis.

Three ways carry the same payload in the same run, one job each in turn, each answered by a process of its own: `ours`
(`Client.decide` to `GpuWorker`, with validation on both sides, leases, fencing and bounds), a raw stream (consumer
group, reply by BLPOP) and a raw list (BLMOVE, reply by BLPOP). The ratio is ours to the raw stream.

All of it twice: with processes as they come, and with processes that keep their memory, as the worker's image has it.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import redis
from PIL import Image

from benchmarks.load import free_port
from benchmarks.screens import png
from producer.client import Client
from producer.contract import build_payload
from worker.embedded import EmbeddedServer
from worker.lock import Device
from worker.worker import GpuWorker

MIB = 2**20
SIZES_MIB = (0.2, 1.0, 4.0)
QUESTIONS = {
    "next": {"type": "choice", "instructions": "Save the file", "criteria": {"save": "Save", "cancel": None}},
    "done": {"type": "choice", "instructions": None, "criteria": {"yes": None, "no": None}},
}
# glibc gives large blocks back to the kernel after each use and faults them in again, 0.25 ms a MiB and process, unless
# these are set. All the processes of a run get the same.
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(256 * MIB), "MALLOC_MMAP_THRESHOLD_": str(256 * MIB)}
MEMORY = {"plain": "processes as they come", "kept": "processes that keep their memory"}
BLOCK_S = 1
PICTURES = 16


class Way(NamedTuple):
    """One way of getting a payload answered."""

    name: str
    ask: Callable[[bytes], None]


class NothingEngine:
    """Decides nothing, at once."""

    identity = SimpleNamespace(name="nothing", hashes={})

    def warm_up(self, report: object) -> None:
        """Nothing."""

    def prepare(self, image: bytes, questions: Any, media_type: str | None = None) -> Any:
        """The questions."""
        return questions

    def decide_prepared(self, questions: Any) -> Any:
        """Every option alike."""
        probabilities = tuple((1 / len(question.labels),) * len(question.labels) for question in questions)
        timings = SimpleNamespace(prepare_ms=0.0, vision_ms=0.0, language_ms=0.0)
        return SimpleNamespace(probabilities=probabilities, input_tokens=1, timings=timings)


class NothingWorker(GpuWorker):
    """`GpuWorker` with that engine."""

    def choose_device(self) -> Device:
        """None."""
        return Device("none", "no device", f"none-{os.getpid()}")

    def load_engine(self, device: Device, report: object) -> Any:
        """The engine."""
        return NothingEngine()


def serve_ours(url: str) -> None:
    """Our worker's process."""
    NothingWorker("benchmark", connection=redis.Redis.from_url(url)).work(logging_level="WARNING")


def serve_stream(url: str) -> None:
    """A raw stream's worker: one consumer of a group."""
    client = redis.Redis.from_url(url, socket_timeout=None)
    client.xgroup_create("raw:stream", "workers", id="0", mkstream=True)
    while True:
        found: Any = client.xreadgroup("workers", "one", {"raw:stream": ">"}, count=1, block=BLOCK_S * 1000)
        for _, entries in found.items() if isinstance(found, dict) else found or ():
            for entry_id, fields in entries[0] if isinstance(entries[0], list) else entries:
                with client.pipeline(transaction=True) as pipeline:
                    pipeline.rpush(b"raw:reply:" + fields[b"id"], b'{"answer": 1}')
                    pipeline.expire(b"raw:reply:" + fields[b"id"], 60)
                    pipeline.xack("raw:stream", "workers", entry_id)
                    pipeline.xdel("raw:stream", entry_id)
                    pipeline.execute()


def serve_list(url: str) -> None:
    """A raw list's worker: moves an entry to a list of its own, answers, removes it."""
    client = redis.Redis.from_url(url, socket_timeout=None)
    while True:
        entry: Any = client.blmove("raw:list", "raw:taken", BLOCK_S, "LEFT", "RIGHT")
        if entry is None:
            continue
        with client.pipeline(transaction=True) as pipeline:
            pipeline.rpush(b"raw:reply:" + entry[:32], b'{"answer": 1}')
            pipeline.expire(b"raw:reply:" + entry[:32], 60)
            pipeline.lpop("raw:taken")
            pipeline.execute()


SERVERS = {"ours": serve_ours, "stream": serve_stream, "list": serve_list}


def ways(url: str) -> tuple[Way, ...]:
    """The producers' side of each."""
    ours = Client(url, queue="benchmark")
    raw = redis.Redis.from_url(url, socket_timeout=None)

    def ask_ours(image: bytes) -> None:
        assert ours.decide(image, QUESTIONS).ok

    def ask_stream(image: bytes) -> None:
        job_id = uuid.uuid4().hex
        raw.xadd("raw:stream", {"id": job_id, "payload": payloads[id(image)]})
        assert raw.blpop([f"raw:reply:{job_id}"], timeout=10)

    def ask_list(image: bytes) -> None:
        job_id = uuid.uuid4().hex
        raw.rpush("raw:list", job_id.encode() + payloads[id(image)])
        assert raw.blpop([f"raw:reply:{job_id}"], timeout=10)

    return Way("ours", ask_ours), Way("stream", ask_stream), Way("list", ask_list)


# The raw ways are given their payload ready made.
payloads: dict[int, bytes] = {}


def noise(size_bytes: int) -> bytes:
    """A PNG of noise, less than 1 % under a size: pixels of four bytes, since 4 MiB of three are too many."""
    side = int(math.sqrt(0.999 * size_bytes / 4))
    return png(Image.frombytes("RGBA", (side, side), os.urandom(4 * side * side)))


def screenshots(size_mib: float) -> list[bytes]:
    """Pictures of a size and up to 3 % under it: one size alone would measure how the memory of its buffers lies."""
    return [noise(round(size_mib * MIB * (1 - 0.03 * number / PICTURES))) for number in range(PICTURES)]


def measure(url: str, size_mib: float, jobs: int) -> dict[str, list[float]]:
    """Milliseconds from submit to result, by way."""
    images = screenshots(size_mib)
    payloads.update({id(image): build_payload(image, QUESTIONS) for image in images})
    spent_ms: dict[str, list[float]] = {}
    carriers = ways(url)
    for number in range(jobs + 10):
        image = images[number % PICTURES]
        for way in (*carriers[number % 3 :], *carriers[: number % 3]):
            started_s = time.perf_counter()
            way.ask(image)
            if number >= 10:
                spent_ms.setdefault(way.name, []).append((time.perf_counter() - started_s) * 1000)
    return spent_ms


def report(size_mib: float, spent_ms: dict[str, list[float]]) -> str:
    """One size's rows."""
    stream_ms = statistics.median(spent_ms["stream"])
    rows = []
    for name, times in spent_ms.items():
        p20, p50, p95 = (statistics.quantiles(times, n=20)[index] for index in (3, 9, 18))
        ratio = f"{statistics.median(times) / stream_ms:.2f}"
        rows.append(f"| {size_mib:g} | {name} | {p20:.2f} | {p50:.2f} | {p95:.2f} | {ratio} |")
    return "\n".join(rows)


def start_server(folder: Path, kind: str) -> tuple[str, Callable[[], object]]:
    """A fresh server without persistence: its URL, and what stops it."""
    if kind == "embedded":
        server = EmbeddedServer(folder, free_port())
        url = server.start()
        redis.Redis.from_url(url).config_set("appendonly", "no")
        return url, server.stop
    port = free_port()
    command = ["redis-server", "--port", str(port), "--save", "", "--dir", str(folder), "--loglevel", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    for _ in range(100):
        try:
            redis.Redis.from_url(url).ping()
            break
        except redis.ConnectionError:
            time.sleep(0.05)
    return url, process.terminate


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200, help="jobs of each way at each size (default 200)")
    parser.add_argument("--server", choices=["redis", "embedded"], help="default: redis-server if installed")
    parser.add_argument("--memory", choices=sorted(MEMORY), help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=sorted(SERVERS), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        SERVERS[arguments.serve](arguments.url)
        return 0
    if arguments.memory is None:
        # glibc reads its settings when a process starts.
        plain = {name: value for name, value in os.environ.items() if name not in KEPT_MEMORY}
        command = [sys.executable, "-m", "benchmarks.queue", *sys.argv[1:], "--memory"]
        runs = ([*command, "plain"], plain), ([*command, "kept"], plain | KEPT_MEMORY)
        return max(subprocess.run(command, env=environment).returncode for command, environment in runs)
    kind = arguments.server or ("redis" if shutil.which("redis-server") else "embedded")
    with tempfile.TemporaryDirectory() as folder:
        url, stop = start_server(Path(folder), kind)
        servers = [
            subprocess.Popen([sys.executable, "-m", "benchmarks.queue", "--serve", name, "--url", url])
            for name in SERVERS
        ]
        try:
            print(f"\n## With {MEMORY[arguments.memory]}\n\n{_machine(url)}")
            print("\n| MiB | way | p20 ms | p50 ms | p95 ms | p50 / stream |\n|---|---|---|---|---|---|")
            for size_mib in SIZES_MIB:
                print(report(size_mib, measure(url, size_mib, arguments.jobs)), flush=True)
        finally:
            for server in servers:
                server.kill()
            stop()
    return 0


def _machine(url: str) -> str:
    info: Any = redis.Redis.from_url(url).info("server")
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    packages = ", ".join(f"{package} {version(package)}" for package in ("redis", "hiredis", "rq", "msgpack"))
    cpus = f"{os.cpu_count()} CPUs, {platform.machine()}, {platform.system()} {platform.release()}"
    return f"{name} on loopback, no persistence; Python {platform.python_version()}, {packages}; {cpus}"


if __name__ == "__main__":
    sys.exit(main())
