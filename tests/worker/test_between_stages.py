"""A job that nobody wants any more ends when the stage in hand is over: it does not reach the device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tests.servers import IMAGE, QUESTIONS, WAIT_S, Place, asking, wait_until
from tests.worker.noop import NoopEngine, NoopWorker
from worker.answer import Question, Report
from worker.lock import Device


class SlowlyPreparingEngine(NoopEngine):
    """Prepares the job `slow` only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def prepare(
        self, image: bytes, questions: Sequence[Question], media_type: str | None = None
    ) -> tuple[bytes, Sequence[Question]]:
        if questions[0].goal == "slow":
            assert self.gate.wait(WAIT_S)
        return super().prepare(image, questions, media_type)


class SlowlyPreparingWorker(NoopWorker):
    def load_engine(self, device: Device, report: Report) -> NoopEngine:
        return SlowlyPreparingEngine()


@pytest.mark.parametrize(("fate", "status"), [("cancelled", "cancelled"), ("late", "expired"), ("wanted", "ok")])
def test_a_job_is_looked_at_between_its_cpu_work_and_the_device(any_place: Place, fate: str, status: str) -> None:
    place = any_place
    with place.working(SlowlyPreparingWorker) as worker, place.client() as client:
        engine = worker._engine
        assert isinstance(engine, SlowlyPreparingEngine)
        job_id = client.submit(IMAGE, asking("slow"))
        place.wait_running(job_id)
        threading.Event().wait(0.01)  # longer than a stage within which nobody could have cancelled
        if fate == "cancelled":
            assert client.cancel(job_id)
        elif fate == "late":
            place.redis.hset(place.keys.rq_job(job_id), "deadline_us", 1)
        engine.gate.set()
        result = client.result(job_id)
        assert (result.status, result.attempts, result.worker) == (status, 1, worker.name)
        assert engine.decided == (["slow"] if fate == "wanted" else [])
        wait_until(lambda: place.state(worker.name) == "ready", "the worker to be idle")
        assert "job" not in place.redis.hgetall(place.keys.worker(worker.name))
        assert client.decide(IMAGE, QUESTIONS).ok
    assert place.redis.zcard(place.keys.leases) == place.redis.zcard(place.keys.wip) == 0
