"""The next job, taken and prepared beside the one on the device: what it may do, and that it loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import redis

from producer.client import Client
from producer.result import Status
from tests.proxy import Proxy
from tests.servers import IMAGE, QUESTIONS, WAIT_S, Place, asking, wait_until
from tests.worker.noop import Fatal, NoopDecision, NoopEngine, NoopWorker, probabilities_of
from worker.answer import Outcome, Question, Report
from worker.link import Claim, Link, own_client
from worker.lock import Device


class GatedEngine(NoopEngine):
    """Its device holds every job until the test lets one go, and notes what happens where."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.prepared: list[str] = []
        self.running: list[str] = []
        self.most_running = 0
        self.fails: Exception | None = None

    def prepare(
        self, image: bytes, questions: Sequence[Question], media_type: str | None = None
    ) -> tuple[bytes, Sequence[Question]]:
        ready = super().prepare(image, questions, media_type)
        self.prepared.append(questions[0].goal)
        return ready

    def decide_prepared(self, prepared: tuple[bytes, Sequence[Question]]) -> NoopDecision:
        self.running.append(prepared[1][0].goal)
        self.most_running = max(self.most_running, len(self.running))
        assert self.gate.acquire(timeout=WAIT_S)
        self.running.pop()
        if self.fails:
            raise self.fails
        return super().decide_prepared(prepared)


class GatedWorker(NoopWorker):
    def load_engine(self, device: Device, report: Report) -> NoopEngine:
        return GatedEngine()


@contextmanager
def gated(place: Place) -> Iterator[tuple[NoopWorker, GatedEngine]]:
    """A ready worker and its engine; at the end every job may go."""
    with place.working(GatedWorker) as worker:
        engine = worker._engine
        assert isinstance(engine, GatedEngine)
        try:
            yield worker, engine
        finally:
            engine.gate.release(1000)


def submit(client: Client, *goals: str) -> list[str]:
    return [client.submit(IMAGE, asking(goal)) for goal in goals]


def wait_prepared(engine: GatedEngine, *goals: str) -> None:
    wait_until(lambda: engine.prepared == list(goals), f"{goals} to be prepared")


def test_one_job_is_prepared_beside_the_running_one_and_no_more(place: Place) -> None:
    with gated(place) as (worker, engine), place.client() as client:
        ids = submit(client, "first", "second", "third", "fourth")
        wait_prepared(engine, "first", "second")
        time.sleep(0.05)  # room for a third, if it were taken
        assert (engine.prepared, engine.running) == (["first", "second"], ["first"])
        assert place.redis.lrange(place.keys.queue, 0, -1) == ids[2:]
        assert place.redis.hget(place.keys.worker(worker.name), "job") == ids[0]
        engine.gate.release()
        wait_prepared(engine, "first", "second", "third")
        engine.gate.release(3)
        results = [client.result(job_id) for job_id in ids]
    assert [(result.status, result.attempts) for result in results] == [("ok", 1)] * 4
    assert engine.decided == ["first", "second", "third", "fourth"] and engine.most_running == 1
    ends = [str(result.finished_at) for result in results]
    assert ends == sorted(ends)
    assert place.redis.zcard(place.keys.leases) == place.redis.zcard(place.keys.wip) == 0


def test_a_long_job_after_quick_ones_has_the_next_one_prepared_beside_it(place: Place) -> None:
    with gated(place) as (_, engine), place.client() as client:
        engine.gate.release(2)
        assert all(client.decide(IMAGE, asking(goal)).ok for goal in ("quick", "quicker"))
        ids = submit(client, "long", "next")
        wait_prepared(engine, "quick", "quicker", "long", "next")
        assert engine.running == ["long"]
        engine.gate.release(2)
        assert [client.result(job_id).attempts for job_id in ids] == [1, 1]


class BriefEngine(NoopEngine):
    """Its device takes long enough for the next job to be prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0

    def prepare(
        self, image: bytes, questions: Sequence[Question], media_type: str | None = None
    ) -> tuple[bytes, Sequence[Question]]:
        self.ahead += threading.current_thread().name.startswith("ahead")
        return super().prepare(image, questions, media_type)

    def decide_prepared(self, prepared: tuple[bytes, Sequence[Question]]) -> NoopDecision:
        time.sleep(0.008)
        return super().decide_prepared(prepared)


class BriefWorker(NoopWorker):
    def load_engine(self, device: Device, report: Report) -> NoopEngine:
        return BriefEngine()


def test_answers_of_jobs_prepared_ahead_are_the_serial_ones(any_place: Place) -> None:
    images = [IMAGE + bytes([number]) for number in range(24)]
    with any_place.working(BriefWorker) as worker, any_place.client() as client:
        serial = [client.decide(image, QUESTIONS).body for image in images]
        engine = worker._engine
        assert isinstance(engine, BriefEngine)
        engine.ahead = 0
        ids = [client.submit(image, QUESTIONS) for image in images]
        assert [client.result(job_id).body for job_id in ids] == serial
        assert engine.ahead > 0
    assert any_place.redis.zcard(any_place.keys.leases) == 0


def test_a_job_cancelled_while_prepared_never_reaches_the_device(place: Place) -> None:
    with gated(place) as (_, engine), place.client() as client:
        first, second, third = submit(client, "first", "second", "third")
        wait_prepared(engine, "first", "second")
        assert client.cancel(second)
        engine.gate.release(3)
        assert client.result(second).status == "cancelled"
        assert client.result(first).ok and client.result(third).ok
    assert engine.decided == ["first", "third"]


def test_a_job_whose_deadline_passes_while_prepared_never_reaches_the_device(place: Place) -> None:
    with gated(place) as (_, engine), place.client() as client:
        first, second = submit(client, "first", "second")
        wait_prepared(engine, "first", "second")
        place.redis.hset(place.keys.rq_job(second), "deadline_us", 1)
        engine.gate.release(2)
        assert client.result(first).ok, "though nothing came after it"
        assert client.result(second).status == "expired"
    assert engine.decided == ["first"]


def test_a_refusal_does_not_wait_for_the_device(place: Place) -> None:
    with gated(place) as (worker, engine), place.client() as client:
        (first,) = submit(client, "first")
        wait_prepared(engine, "first")
        refused = client.result(client.submit(b"GIF89a", QUESTIONS))
        assert (refused.status, refused.attempts, engine.running) == ("invalid", 1, ["first"])
        (third,) = submit(client, "third")
        wait_prepared(engine, "first", "third")
        engine.gate.release(2)
        assert client.result(first).ok and client.result(third).ok
        assert place.redis.hget(place.keys.worker(worker.name), "jobs") == "3"


def test_a_worker_that_leaves_gives_the_prepared_job_back(place: Place) -> None:
    with place.client() as client:
        with gated(place) as (worker, engine):
            ids = submit(client, "first", "second", "third")
            wait_prepared(engine, "first", "second")
            worker.stop()
        assert client.result(ids[0]).ok and engine.decided == ["first"]
        assert place.redis.lrange(place.keys.queue, 0, -1) == ids[1:], "in their old order"
        assert place.redis.zcard(place.keys.leases) == place.redis.zcard(place.keys.wip) == 0
        with place.working():
            assert [client.result(job_id).attempts for job_id in ids] == [1, 1, 1]


def test_a_lost_device_gives_the_prepared_job_back(place: Place) -> None:
    worker = place.worker(GatedWorker)
    with ThreadPoolExecutor(1) as pool, place.client() as client:
        working = pool.submit(worker.work)
        place.wait_ready(worker.name)
        engine = worker._engine
        assert isinstance(engine, GatedEngine)
        first, second = submit(client, "first", "second")
        wait_prepared(engine, "first", "second")
        engine.fails = Fatal(5, "the device is gone")
        engine.gate.release()
        assert client.result(first).status == "failed"
        assert isinstance(working.exception(WAIT_S), SystemExit) and worker.exit_code == 5
        assert place.redis.lrange(place.keys.queue, 0, -1) == [second]


def test_a_killed_worker_loses_neither_job(place: Place) -> None:
    place.changes |= {"lease_s": 0.5, "beat_s": 0.1}
    with place.client() as client, place.process() as process:
        first, second = submit(client, "sleep 0.4", "second")
        place.wait_running(second)
        process.kill()
        process.wait()
        with place.working():
            results = [client.result(job_id) for job_id in (first, second)]
    assert [(result.status, result.attempts) for result in results] == [("ok", 2), ("ok", 1)], "one began only once"


def test_a_beat_keeps_both_leases(place: Place) -> None:
    place.changes |= {"lease_s": 0.5, "beat_s": 0.1}
    with gated(place) as (_, engine), place.client() as client:
        ids = submit(client, "first", "second")
        wait_prepared(engine, "first", "second")
        time.sleep(0.7)
        assert link_to(place, "other").take(block=False) is None, "longer than a lease, and still its owner's"
        engine.gate.release(2)
        assert [client.result(job_id).attempts for job_id in ids] == [1, 1]


def test_an_idle_worker_has_the_job_rather_than_a_busy_one(place: Place) -> None:
    with gated(place) as (_, engine), place.client() as client:
        (first,) = submit(client, "first")
        wait_prepared(engine, "first")
        with place.working() as idle:
            for number in range(10):
                assert client.decide(IMAGE, asking(f"number {number}")).worker == idle.name
                time.sleep(0.005)
        assert engine.prepared == ["first"]
        engine.gate.release()
        assert client.result(first).ok


def test_a_worker_with_a_number_of_jobs_takes_none_ahead(place: Place) -> None:
    with place.client() as client:
        first, second = submit(client, "sleep 0.1", "second")
        worker = place.worker(BriefWorker)
        worker.work(max_jobs=1)
        assert isinstance(worker._engine, BriefEngine) and worker._engine.ahead == 0
        assert client.result(first).ok and place.redis.lrange(place.keys.queue, 0, -1) == [second]
        assert place.record(second)[b"status"] == b"queued"


@pytest.mark.parametrize("deliver", [True, False], ids=["reply lost", "command lost"])
def test_a_cut_connection_at_its_turn_neither_loses_nor_repeats_it(place: Place, deliver: bool) -> None:
    port = urlsplit(place.url).port
    assert port is not None
    with Proxy(port) as proxy, place.client() as client, gated(replace(place, url=proxy.url)) as (_, engine):
        ids = submit(client, "first", "second", "third")
        wait_prepared(engine, "first", "second")
        proxy.cut(b"cancelled before its turn", deliver=deliver)
        engine.gate.release(3)
        assert [(client.result(job_id).status, client.result(job_id).attempts) for job_id in ids] == [("ok", 1)] * 3
        assert proxy.cuts == 1 and engine.decided == ["first", "second", "third"]


def link_to(place: Place, name: str, **changes: float) -> Link:
    """A worker's link without the worker: its steps one by one."""
    settings = replace(place.settings, **changes)  # type: ignore[arg-type]
    return Link(own_client(redis.Redis.from_url(place.url)), settings, name)


def both_taken(place: Place, **changes: float) -> tuple[Link, Claim]:
    """A link that has one of two jobs in hand and the other, whose claim is returned, ahead."""
    with place.client() as client:
        submit(client, "first", "second")
    link = link_to(place, "busy", **changes)
    assert link.take(block=False) is not None
    claim = link.take_ahead()
    assert claim is not None and claim.attempts == 1
    return link, claim


def finish(link: Link, claim: Claim) -> bool:
    outcome = Outcome(Status.OK, "an answer", "", 1.0, 2.0, 3.0)
    return link.finish(claim, outcome, model="m", state="ready", run_ms=1.0) is not None


def test_its_turn_counts_once(any_place: Place) -> None:
    link, claim = both_taken(any_place)
    assert any_place.record(claim.job_id)[b"attempts"] == b"0"
    assert link.begin(claim) and link.begin(claim), "asked again after a lost reply"
    assert any_place.record(claim.job_id)[b"attempts"] == b"1"
    assert any_place.redis.hget(any_place.keys.worker("busy"), "job") == claim.job_id
    assert finish(link, claim) and any_place.result(claim.job_id)["attempts"] == "1"


def test_a_job_whose_lease_was_lost_is_not_begun(place: Place) -> None:
    slow, claim = both_taken(place, lease_s=0.2, beat_s=0.1)
    time.sleep(0.25)
    quick = link_to(place, "quick")
    retaken = {again.job_id: again for again in (quick.take(block=False), quick.take(block=False)) if again}
    assert retaken[claim.job_id].attempts == 1, "it was never begun"
    assert not slow.begin(claim)
    slow.give_back(claim)
    assert finish(quick, retaken[claim.job_id]), "nor given back"


def test_a_job_given_back_counts_as_never_taken(place: Place) -> None:
    link, claim = both_taken(place)
    link.give_back(claim)
    link.give_back(claim)
    assert place.redis.lrange(place.keys.queue, 0, -1) == [claim.job_id]
    again = link.take_ahead()
    assert again is not None and (again.job_id, again.attempts) == (claim.job_id, 1)


def test_a_job_that_ends_whoever_prepares_it_ends(place: Place) -> None:
    """Lost while it was ahead, it is no more taken ahead; then its attempts are counted from the start."""
    _, claim = both_taken(place, lease_s=0.2, beat_s=0.1)
    for number in range(3):
        time.sleep(0.25)
        link = link_to(place, f"next-{number}", lease_s=0.2, beat_s=0.1)
        one, none, other = link.take(block=False), link.take_ahead(), link.take(block=False)
        assert none is None, "it waits, but not for being taken ahead"
        taken = {again.job_id: again.attempts for again in (one, other) if again}
        assert taken[claim.job_id] == number + 1
    time.sleep(0.25)
    with place.client() as client:
        result = client.result(claim.job_id)
    assert (result.status, result.attempts) == ("failed", 3)
    assert result.error is not None and result.error.code == "worker_lost"


def test_a_job_of_a_server_that_lost_its_data_is_still_answered(place: Place) -> None:
    link, claim = both_taken(place)
    place.redis.delete(place.keys.rq_job(claim.job_id), place.keys.payload(claim.job_id), place.keys.leases)
    assert link.begin(claim) and finish(link, claim)
    assert place.result(claim.job_id)["body"] == "an answer"


def test_the_answer_is_a_function_of_the_job_alone(place: Place) -> None:
    """Two pictures and goals, one running and one prepared: neither gets the other's."""
    other = IMAGE + b"another"
    with gated(place) as (_, engine), place.client() as client:
        first, second = client.submit(IMAGE, asking("one")), client.submit(other, asking("two"))
        wait_prepared(engine, "one", "two")
        engine.gate.release(2)
        found = [tuple(client.result(job_id).answers["q"].probabilities.values()) for job_id in (first, second)]
    expected = [(IMAGE, "one"), (other, "two")]
    assert found == [probabilities_of(image, Question("q", goal, ("a", "b"))) for image, goal in expected]


def test_ends_have_the_order_of_the_jobs_however_long_each_takes(place: Place) -> None:
    goals = ["sleep 0.02" if number % 2 == 0 else f"quick {number}" for number in range(30)]
    with place.client() as client:
        ids = submit(client, *goals)
        with place.working() as worker:
            results = [client.result(job_id) for job_id in ids]
        ends = [str(result.finished_at) for result in results]
        assert ends == sorted(ends)
        assert worker._engine.decided == goals  # type: ignore[union-attr]
