"""What Prometheus reads from a worker, and that it costs no job anything when it cannot."""

from __future__ import annotations

import re
import socket
import urllib.request
from dataclasses import replace

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from engine import Stats
from tests.servers import IMAGE, QUESTIONS, ROOT, Place, asking, free_port, wait_until
from tests.worker.noop import NoopEngine, NoopWorker
from worker.answer import Report
from worker.lock import Device
from worker.settings import SettingsError
from worker.supervise import metrics_ports


class Counting(NoopEngine):
    def stats(self) -> Stats:
        return Stats(image_cache_hits=3, image_cache_misses=4, image_cache_bytes=5, graphs=6, allocated_bytes=7)


class CountingWorker(NoopWorker):
    def load_engine(self, device: Device, report: Report) -> NoopEngine:
        return Counting()


def scrape(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    assert "Save the file" not in text and "no image" not in text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def measured(place: Place) -> Place:
    return replace(place, changes={"metrics_port": free_port()})


def test_the_numbers_are_those_of_the_jobs(measured: Place) -> None:
    with measured.client() as client, measured.working(CountingWorker) as worker:
        assert client.decide(IMAGE, QUESTIONS).ok and client.decide(IMAGE, asking("x")).ok
        assert client.decide(IMAGE, asking("raise")).status == "failed"
        assert client.decide(b"no image", QUESTIONS).status == "invalid"
        slow = client.submit(IMAGE, asking("sleep 1"))
        measured.wait_running(slow)
        client.submit(IMAGE, QUESTIONS, job_id=measured.id("late"), deadline_s=0.01)
        assert client.result(slow).ok
        client.result(measured.id("late"))
        found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

        def all_answers_are_counted() -> bool:
            found.update(scrape(measured.settings.metrics_port))
            return found.get(("cua_jobs_total", (("code", ""), ("status", "ok")))) == 3

        wait_until(all_answers_are_counted, "the last job to be counted, just after its client was woken")
        jobs = {labels: value for (name, labels), value in found.items() if name == "cua_jobs_total"}
        by_code = {(dict(labels)["status"], dict(labels)["code"]): value for labels, value in jobs.items()}
        assert by_code.pop(("expired", "expired"), 1) == 1, "by this worker, unless the waiting client was first"
        assert by_code == {("ok", ""): 3, ("failed", "inference_failed"): 1, ("invalid", "unsupported_format"): 1}
        stages = {
            dict(labels)["stage"]: value for (name, labels), value in found.items() if name.endswith("seconds_count")
        }
        assert stages == {"queue": 5, "prepare": 3, "vision": 3, "language": 3, "total": 5}
        assert found["cua_stage_seconds_sum", (("stage", "vision"),)] == pytest.approx(3 * 2.25e-3)
        assert found["cua_request_questions_bucket", (("le", "1.0"),)] == 3
        assert found["cua_request_questions_sum", ()] >= 5
        assert found["cua_queue_readable", ()] == 1 and found["cua_queue_waiting_jobs", ()] == 0
        assert found["cua_queue_workers", (("state", measured.state(worker.name) or ""),)] == 1
        assert found["cua_checkpoint_info", (("base", "00ff"), ("model", "noop@0:test"))] == 1
        names = (
            "image_cache_hits_total",
            "image_cache_misses_total",
            "image_cache_bytes",
            "graphs",
            "gpu_allocated_bytes",
        )
        assert [found[f"cua_{name}", ()] for name in names] == [3, 4, 5, 6, 7]


def test_the_manual_lists_exactly_what_is_served(measured: Place) -> None:
    with measured.client() as client, measured.working(CountingWorker):
        for _ in range(2):  # a job is counted just after its client was woken: before the next one is taken
            client.decide(IMAGE, QUESTIONS)
        names = {name for name, _ in scrape(measured.settings.metrics_port) if not name.endswith("_created")}
    section = (ROOT / "docs" / "operate.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    assert set(re.findall(r"\bcua_\w+", section)) == {re.sub("_(bucket|count|sum)$", "", name) for name in names}


def test_what_waits_is_seen_with_its_age(measured: Place) -> None:
    with measured.client() as client, measured.working():
        measured.wait_running(client.submit(IMAGE, asking("sleep 1")))
        measured.wait_running(client.submit(IMAGE, QUESTIONS))  # prepared ahead
        waiting = client.submit(IMAGE, QUESTIONS)
        earlier_us = int(measured.record(waiting)[b"enqueued_us"]) - 5_000_000
        measured.redis.hset(measured.keys.rq_job(waiting), "enqueued_us", earlier_us)
        found = scrape(measured.settings.metrics_port)
    assert (found["cua_queue_waiting_jobs", ()], found["cua_queue_running_jobs", ()]) == (1, 2)
    assert 5 <= found["cua_queue_oldest_waiting_seconds", ()] < 35 and found["cua_queue_waiting_bytes", ()] > 0


def test_without_the_server_the_worker_still_tells_its_own_numbers(measured: Place) -> None:
    from worker.metrics import Metrics

    nowhere = redis.Redis.from_url(f"redis://:secret@127.0.0.1:{free_port()}/0")
    with Metrics(nowhere, measured.settings) as metrics:
        metrics.ended("ok", "", total_ms=5.0)
        found = scrape(measured.settings.metrics_port)
    assert found["cua_queue_readable", ()] == 0 and ("cua_queue_waiting_jobs", ()) not in found
    assert found["cua_jobs_total", (("code", ""), ("status", "ok"))] == 1


def test_nobody_listens_unless_asked_and_the_port_is_free_again(measured: Place, place: Place) -> None:
    with measured.working():
        scrape(measured.settings.metrics_port)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", measured.settings.metrics_port)):
        pass
    assert place.settings.metrics_port == 0
    assert metrics_ports(place.settings, 2) == [0, 0] and metrics_ports(replace(measured).settings, 2) == [
        measured.settings.metrics_port, measured.settings.metrics_port + 1,
    ]  # fmt: skip


def test_a_port_that_is_taken_is_a_sentence(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with place.process(environment={"CUA_METRICS_PORT": str(port)}, ready=False) as process:
            output, _ = process.communicate(timeout=30)
    assert process.returncode == 2 and f"metrics cannot be served at 127.0.0.1:{port}" in output
    with pytest.raises(SettingsError, match="metrics_port is 70000"):
        replace(place.settings, metrics_port=70_000)
