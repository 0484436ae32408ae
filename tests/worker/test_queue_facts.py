"""How a queue stands, as `python -m worker queue` and whoever else asks is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.servers import IMAGE, QUESTIONS, ROOT, Place, asking, free_port, wait_until
from worker.queue_facts import QueueFacts, read_facts


def queue_command(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "worker", "queue", *arguments],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_an_unused_queue_is_empty(any_place: Place) -> None:
    facts = read_facts(any_place.raw, any_place.keys)
    assert facts == QueueFacts(0, 0, None, 0, {}, None)
    assert (facts.serving_workers, facts.capacity_jobs_per_s, facts.drain_s) == (0, None, None)


def test_the_facts_are_those_of_the_queue(any_place: Place) -> None:
    place = any_place
    with place.client() as client, place.working():
        assert client.decide(IMAGE, QUESTIONS).ok
        running = client.submit(IMAGE, asking("sleep 1"))
        place.wait_running(running)
        place.wait_running(client.submit(IMAGE, QUESTIONS))  # prepared ahead
        first = client.submit(IMAGE, QUESTIONS)
        client.submit(IMAGE + bytes(100), QUESTIONS)
        earlier_us = int(place.record(first)[b"enqueued_us"]) - 5_000_000
        place.redis.hset(place.keys.rq_job(first), "enqueued_us", earlier_us)
        sizes = [int(size) for size in place.redis.hvals(place.keys.waiting)]
        facts = read_facts(place.redis, place.keys)
        client.cancel(running)
    assert (facts.waiting_jobs, facts.running_jobs, facts.workers) == (2, 2, {"busy": 1})
    assert facts.waiting_bytes == sum(sizes) and len(sizes) == 2
    assert facts.oldest_waiting_s is not None and 5.0 <= facts.oldest_waiting_s < 35.0
    assert facts.job_ms is not None and facts.capacity_jobs_per_s == pytest.approx(1000 / facts.job_ms)
    assert facts.drain_s == pytest.approx(2 * facts.job_ms / 1000)
    wait_until(lambda: read_facts(place.redis, place.keys).workers == {}, "a worker that left to be in no state")


def test_what_strangers_write_is_counted_as_nothing(place: Place) -> None:
    keys = place.keys
    place.redis.rpush(keys.queue, "no such job", "\x00")
    place.raw.rpush(keys.queue, b"\xff")
    place.redis.hset(keys.waiting, mapping={"x": "many", "y": "-5", "z": "7"})
    place.redis.zadd(keys.workers, {"gone": 1, "odd": 2, "a string": 3})
    place.redis.hset(keys.worker("odd"), "jobs", 3)
    place.redis.set(keys.worker("a string"), "x")
    for rate in ("quick", "nan", "inf", "-3", "0"):
        place.redis.hset(keys.rate, "job_ms", rate)
        assert read_facts(place.raw, keys) == QueueFacts(3, 7, None, 0, {"unknown": 1}, None)
    for key in (keys.queue, keys.waiting, keys.leases, keys.rate, keys.workers):
        place.redis.delete(key)
        place.redis.set(key, "another type")
    assert read_facts(place.raw, keys) == QueueFacts(0, 0, None, 0, {}, None)
    assert place.redis.get(keys.queue) == "another type", "asking changes nothing"


def test_the_command_prints_them(place: Place) -> None:
    with place.client() as client:
        client.submit(IMAGE, QUESTIONS)
    shown = queue_command("--json", environment=place.environment)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found.pop("oldest_waiting_s") >= 0
    assert found == {
        "waiting_jobs": 1, "waiting_bytes": int(place.redis.hvals(place.keys.waiting)[0]), "running_jobs": 0,
        "workers": {}, "job_ms": None, "serving_workers": 0, "capacity_jobs_per_s": None, "drain_s": None,
    }  # fmt: skip
    told = queue_command(environment=place.environment)
    assert told.returncode == 0 and "1 jobs, " in told.stdout and "none" in told.stdout
    assert "not known yet" in told.stdout and place.queue in told.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--redis-url", f"redis://u:secret@127.0.0.1:{free_port()}/0"), 1, "connecting"),
        (("--queue", "a b"), 2, "queue name"),
    ],
)
def test_the_command_says_why_it_cannot(arguments: tuple[str, ...], code: int, says: str) -> None:
    done = queue_command(*arguments, environment={})
    assert done.returncode == code and says in done.stderr and "secret" not in done.stderr and not done.stdout
