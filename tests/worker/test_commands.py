"""`python -m worker run` and `status` as a user types them, and the bundled server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from producer.client import Client
from tests.servers import IMAGE, QUESTIONS, ROOT, Place, asking, free_port, wait_until
from worker.embedded import EmbeddedServer
from worker.settings import SettingsError

URL = re.compile(r"^server (redis://\S+) ", re.MULTILINE)


def worker_command(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "worker", *arguments],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("command", [(), ("run",), ("status",)])
def test_help_names_the_commands_and_gives_examples(command: tuple[str, ...]) -> None:
    done = worker_command(*command, "--help", environment={})
    assert done.returncode == 0
    for word in ("run", "status", "verify", "export", "synthesize") if not command else ("examples:", "exit codes:"):
        assert word in done.stdout


def test_status_tells_whether_a_worker_is_ready(place: Place) -> None:
    nobody = worker_command("status", environment=place.environment)
    assert nobody.returncode == 1 and "0 waiting, 0 running" in nobody.stdout
    with place.working() as worker, place.client() as client:
        job_id = client.submit(IMAGE, asking("sleep 2"))
        place.wait_running(job_id)
        place.wait_running(client.submit(IMAGE, QUESTIONS))  # prepared ahead
        client.submit(IMAGE, QUESTIONS)
        busy = worker_command("status", environment=place.environment)
        assert busy.returncode == 0 and "1 waiting, 2 running" in busy.stdout
        row = next(line for line in busy.stdout.splitlines() if line.startswith(worker.name))
        assert re.split(r"\s{2,}", row)[:4] == [worker.name, "busy", "no device", "noop@0:test"] or "busy" in row
        client.cancel(job_id)


def test_status_waits_until_a_worker_is_ready(place: Place) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-m", "worker", "status", "--wait", "ready", "--timeout-s", "60"],
        cwd=ROOT, env={**os.environ, **place.environment}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with place.working():
        assert waiting.wait(timeout=30) == 0
    assert "ready" in waiting.communicate()[0]
    timed_out = worker_command("status", "--wait", "ready", "--timeout-s", "0.1", environment=place.environment)
    assert timed_out.returncode == 1


def test_status_says_why_a_worker_failed(place: Place) -> None:
    with place.process(environment={"NOOP_WARM_UP": "fail"}, ready=False) as process:
        process.wait(timeout=20)
    shown = worker_command("status", environment=place.environment)
    assert shown.returncode == 1 and "failed: Fatal: the warm-up decision did not add up" in shown.stdout
    waiting = worker_command("status", "--wait", "ready", "--timeout-s", "0.5", environment=place.environment)
    (line,) = waiting.stderr.splitlines()
    assert line.startswith("waiting: ") and "failed: Fatal: the warm-up decision did not add up" in line


def test_status_without_a_server() -> None:
    done = worker_command("status", "--redis-url", f"redis://:secret@127.0.0.1:{free_port()}/0", environment={})
    assert done.returncode == 1 and "error:" in done.stderr and "secret" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--queue", "a b"), "queue name"),
        (("--redis-url", "http://x"), "redis://"),
        (("--lease", "3"), "unrecognized arguments"),
        (("--device", "tpu"), "cuda:<index>"),
        (("--checkpoint", "/nowhere"), "/nowhere"),
    ],
)
def test_a_wrong_option_is_named(place: Place, arguments: tuple[str, ...], says: str) -> None:
    done = worker_command("run", *arguments, environment=place.environment)
    assert done.returncode in (2, 3) and says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_with_the_bundled_server_needs_nothing_else(place: Place, tmp_path: Path) -> None:
    """It prints its URL; killed hard it leaves no server; started again it finds the job that waited."""
    # Killed, it may hold the waiting job too, prepared ahead: then the lease brings that back.
    place = replace(place, changes={"lease_s": 2.0, "beat_s": 0.5})
    command = ("-m", "tests.worker.noop", "run", "--name", "w", "--embedded", str(tmp_path / "data"))
    with place.process(*command, ready=False) as process:
        assert process.stdout is not None
        found = URL.search(process.stdout.readline())
        assert found
        here = replace(place, url=found.group(1))
        here.wait_ready("w")
        assert here.redis.config_get("appendonly") == {"appendonly": "yes"}
        assert here.redis.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        with here.client() as client:
            assert client.decide(IMAGE, QUESTIONS).ok
            running = client.submit(IMAGE, asking("sleep 2"))
            here.wait_running(running)
            waiting = client.submit(IMAGE, QUESTIONS)
        process.kill()
        process.wait()
    wait_until(lambda: not answers(here.url), "the server to be gone")
    with place.process(*command, ready=False) as process:
        assert process.stdout is not None
        found = URL.search(process.stdout.readline())
        assert found
        with Client(found.group(1), queue=place.queue, prefix=place.prefix) as client:
            assert client.result(waiting).ok
        process.terminate()
        assert process.wait(timeout=20) == 0
    wait_until(lambda: not answers(found.group(1)), "the server to be gone")


def answers(url: str) -> bool:
    try:
        return bool(redis.Redis.from_url(url, retry=None).ping())
    except redis.RedisError:
        return False


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, free_port()) as first:
        with pytest.raises(SettingsError, match=re.escape(first.url)):
            EmbeddedServer(tmp_path, free_port()).start()
        assert answers(first.url)
    assert not answers(first.url)


def test_a_server_whose_keeper_was_killed_is_ended_before_the_next(tmp_path: Path) -> None:
    first = EmbeddedServer(tmp_path, free_port())
    first.start()
    redis.Redis.from_url(first.url).set("kept", "1")
    assert first._keeper is not None
    first._keeper.kill()
    first._keeper.wait()
    assert answers(first.url), "an orphan"
    with EmbeddedServer(tmp_path, free_port()) as second:
        assert not answers(first.url)
        assert redis.Redis.from_url(second.url).get("kept") == b"1"


def test_a_taken_port_is_said(tmp_path: Path, valkey_url: str) -> None:
    port = int(valkey_url.rsplit(":", 1)[1])
    with pytest.raises(SettingsError, match=str(port)):
        EmbeddedServer(tmp_path, port).start()


def test_the_keeper_says_one_json_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker.embedded", str(tmp_path), str(free_port())],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["url"].startswith("redis://127.0.0.1:")
