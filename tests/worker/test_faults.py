"""Faults, each made for real: no job is lost, none has two answers, and the worker goes on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import pytest
import redis

from producer.errors import QueueFull
from producer.protocol import Protocol
from producer.result import Status
from producer.scripts import CALL
from tests.proxy import Proxy
from tests.servers import IMAGE, QUESTIONS, OwnServer, Place, asking, wait_until
from worker.answer import Outcome
from worker.link import Claim, Link, own_client

SHORT_LEASE = {"lease_s": 0.5, "beat_s": 0.1}


def link_to(place: Place, name: str, **changes: float) -> Link:
    """A worker's link without the worker: its steps one by one."""
    settings = replace(place.settings, **changes)  # type: ignore[arg-type]
    return Link(own_client(redis.Redis.from_url(place.url)), settings, name)


def taken(link: Link) -> Claim:
    claim = link.take(block=False)
    assert claim is not None
    return claim


def outcome(body: str) -> Outcome:
    return Outcome(Status.OK, body, "", 1.0, 2.0, 3.0)


def finish(link: Link, claim: Claim, body: str) -> bool:
    return link.finish(claim, outcome(body), model="m", state="ready", run_ms=1.0) is not None


def test_only_the_leases_owner_ends_a_job(any_place: Place) -> None:
    place = any_place
    slow, quick = (link_to(place, name, lease_s=0.2, beat_s=0.1) for name in ("slow", "quick"))
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
    first = taken(slow)
    assert quick.take(block=False) is None, "one owner at a time"
    time.sleep(0.25)
    second = taken(quick)
    assert (first.job_id, second.job_id, second.attempts) == (job_id, job_id, 2)
    assert second.payload == first.payload
    assert not finish(slow, first, "the late one's"), "its lease has ended"
    assert place.result(job_id) == {}
    assert finish(quick, second, "the owner's")
    assert not finish(slow, first, "the late one's"), "a result is never overwritten"
    result = place.result(job_id)
    assert (result["body"], result["worker"], result["attempts"]) == ("the owner's", "quick", "2")
    assert place.redis.zcard(place.keys.leases) == place.redis.zcard(place.keys.wip) == 0


@pytest.mark.parametrize("block", [False, True])
def test_a_payload_keeps_its_key_while_its_job_runs(any_place: Place, block: bool) -> None:
    place = any_place
    link = link_to(place, "w")
    with place.client() as client:
        if block:
            with ThreadPoolExecutor(1) as pool:
                taking = pool.submit(link.take, block=True)
                job_id = client.submit(IMAGE, QUESTIONS)
                claim = taking.result()
        else:
            job_id = client.submit(IMAGE, QUESTIONS)
            claim = link.take(block=False)
    assert claim is not None and claim.job_id == job_id
    assert place.raw.get(place.keys.payload(job_id)) == claim.payload
    assert not place.redis.keys(place.keys.taken("*"))
    assert 0 < place.redis.pttl(place.keys.payload(job_id)) <= 120_000
    assert finish(link, claim, "x") and not place.redis.exists(place.keys.payload(job_id))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_payload_comes_back_from_a_worker_lost_while_it_read(place: Place, is_cancelled: bool) -> None:
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
        first = taken(link_to(place, "lost", lease_s=0.2, beat_s=0.1))
        place.redis.rename(place.keys.payload(job_id), place.keys.taken(first.token))  # as its claim left it
        if is_cancelled:
            client.cancel(job_id)
        time.sleep(0.25)
        other = link_to(place, "other")
        second = other.take(block=False)
        assert not place.redis.exists(place.keys.taken(first.token))
        if is_cancelled:
            assert second is None and client.result(job_id).status == "cancelled"
        else:
            assert second is not None and second.payload == first.payload and finish(other, second, "x")
    assert not place.redis.exists(place.keys.payload(job_id))


def test_a_late_owner_still_ends_its_job_if_nobody_took_it(place: Place) -> None:
    link = link_to(place, "slow", lease_s=0.2, beat_s=0.1)
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
    claim = taken(link)
    time.sleep(0.25)
    assert finish(link, claim, "late") and place.result(job_id)["body"] == "late"


def test_a_repeated_finish_changes_nothing(place: Place) -> None:
    link = link_to(place, "w")
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
    claim = taken(link)
    assert finish(link, claim, "first")
    written = place.result(job_id)
    assert finish(link, claim, "second"), "asked again after a lost reply"
    assert place.result(job_id) == written
    assert place.redis.xlen(place.keys.stream(job_id)) == 1


def test_a_killed_workers_job_is_answered_by_another(place: Place) -> None:
    place.changes |= SHORT_LEASE
    with place.client() as client, place.process(name="first") as first:
        job_id = client.submit(IMAGE, asking("sleep 1.5"))
        place.wait_running(job_id)
        first.kill()
        first.wait()
        with place.working() as second:
            result = client.result(job_id)
    assert (result.status, result.attempts, result.worker) == ("ok", 2, second.name)


def test_a_job_that_kills_every_worker_ends(place: Place) -> None:
    place.changes |= SHORT_LEASE
    with place.client() as client:
        job_id = client.submit(IMAGE, asking("kill"))
        for name in ("one", "two", "three"):
            with place.process(name=name, ready=False) as process:
                assert process.wait(timeout=20) == -9
        with place.working() as worker:
            result = client.result(job_id)
            assert client.decide(IMAGE, QUESTIONS).ok
        assert worker._engine.decided == ["Save the file"]  # type: ignore[union-attr]
    assert result.status == "failed" and result.error is not None and result.error.code == "worker_lost"
    assert result.attempts == 3 and result.worker == "three"
    assert not place.redis.exists(place.keys.payload(job_id))


def test_a_beat_keeps_the_lease_of_a_long_job(place: Place) -> None:
    place.changes |= SHORT_LEASE
    with place.working(), place.client() as client:
        job_id = client.submit(IMAGE, asking("sleep 1.3"))
        place.wait_running(job_id)
        time.sleep(0.8)
        assert link_to(place, "other").take(block=False) is None, "longer than a lease, and still its owner's"
        result = client.result(job_id)
    assert (result.status, result.attempts) == ("ok", 1)


def test_an_expired_job_is_not_handed_out(place: Place) -> None:
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS, deadline_s=0.01)
    time.sleep(0.02)
    assert link_to(place, "w").take(block=False) is None
    assert place.result(job_id)["status"] == "expired"


def test_a_client_learns_of_lost_workers_when_none_is_left(place: Place) -> None:
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
        for name in ("one", "two", "three"):
            taken(link_to(place, name, lease_s=0.2, beat_s=0.1))
            time.sleep(0.25)
        result = client.result(job_id)
    assert (result.status, result.attempts, result.worker) == ("failed", 3, "three")
    assert result.error is not None and result.error.code == "worker_lost"


def test_an_ended_lease_with_another_token_takes_no_job_away(place: Place) -> None:
    link = link_to(place, "owner")
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
    claim = taken(link)
    place.redis.zadd(place.keys.leases, {f"{job_id}:forged": 1})
    assert link_to(place, "other").take(block=False) is None
    assert finish(link, claim, "mine") and place.result(job_id)["attempts"] == "1"


# What stands in the commands of a worker's steps.
STEPS = {
    "claim": b"local function admit", "pop": b"BLPOP", "read": b"GET\r\n", "put back": b"return 'back'",
    "finish": b"is_orphan", "seal": b"return 'sealed'",
}  # fmt: skip


@pytest.mark.parametrize("deliver", [True, False], ids=["reply lost", "command lost"])
@pytest.mark.parametrize("step", STEPS)
def test_a_workers_cut_connection_neither_loses_nor_repeats_a_job(place: Place, step: str, deliver: bool) -> None:
    port = urlsplit(place.url).port
    assert port is not None
    with Proxy(port) as proxy, place.client() as client:
        behind = replace(place, url=proxy.url)
        with behind.working() as worker:
            assert client.decide(IMAGE, asking("before")).ok
            proxy.cut(STEPS[step], deliver=deliver)
            results = [client.decide(IMAGE, asking(f"job {number}")) for number in range(3)]
            wait_until(lambda: proxy.cuts == 1, "the cut")
            results.append(client.decide(IMAGE, asking("after")))
        assert [(result.status, result.attempts) for result in results] == [("ok", 1)] * 4
        decided = worker._engine.decided  # type: ignore[union-attr]
        assert decided == ["before", "job 0", "job 1", "job 2", "after"]


def test_a_result_outlives_a_restart_of_the_server(place: Place, own_server: OwnServer) -> None:
    """The server is killed while a job runs and back only after it has ended; with its data, and without."""
    here = replace(place, url=own_server.url)
    with here.working() as worker, here.client() as client, ThreadPoolExecutor(2) as pool:
        for keeps_data in (True, False):
            decided = worker._engine.decided  # type: ignore[union-attr]
            decided.clear()
            running = client.submit(IMAGE, asking("sleep 0.6"))
            waiting = client.submit(IMAGE, QUESTIONS)
            here.wait_running(running)
            answer = pool.submit(client.result, running) if keeps_data else None
            if not keeps_data:
                redis.Redis.from_url(own_server.url).flushall()
            own_server.kill()
            time.sleep(0.8)
            own_server.start()
            if answer is None:  # until the worker writes, the server knows of no such job
                result_key = here.keys.result(running)
                wait_until(partial(here.redis.exists, result_key), "the worker to write its result")
                assert client.result(running).ok
            else:
                assert answer.result(timeout=20).ok
            assert decided[0] == "sleep 0.6" and decided.count("sleep 0.6") == 1
            if keeps_data:
                assert client.result(waiting).ok
            wait_until(lambda: here.state(worker.name) == "ready", "the worker to be listed again")


def fill_memory(here: Place) -> None:
    """The server's memory is as large as it must be, and full of something else."""
    here.changes["max_waiting_bytes"] = 2**20
    here.redis.setrange("somebody's", 100 * 2**20, "x")
    here.redis.config_set("maxmemory", "80mb")


def test_a_server_out_of_memory_still_hands_out_and_ends_jobs(place: Place, own_server: OwnServer) -> None:
    here = replace(place, url=own_server.url)
    with here.client() as client:
        ids = [client.submit(IMAGE, QUESTIONS) for _ in range(5)]
        fill_memory(here)
        with pytest.raises(QueueFull, match="memory") as refusal:
            client.submit(IMAGE, QUESTIONS)
        assert refusal.value.retry_after_s > 0
        with here.working():
            assert all(client.result(job_id).ok for job_id in ids)
        here.redis.config_set("maxmemory", "0")


def test_a_suspended_queue_hands_out_nothing(place: Place, own_server: OwnServer) -> None:
    here = replace(place, url=own_server.url)
    link = link_to(here, "w")
    with here.client() as client:
        client.submit(IMAGE, QUESTIONS)
    here.redis.set("rq:suspended", 1)
    assert link.take(block=False) is None
    here.redis.delete("rq:suspended")
    assert link.take(block=False) is not None


def test_wrong_types_under_the_queues_own_keys_are_healed(place: Place) -> None:
    for key in (place.keys.leases, place.keys.wip, place.keys.waiting, place.keys.wake, place.keys.finished,
                place.keys.failed, place.keys.rate, place.keys.workers):  # fmt: skip
        place.redis.set(key, "a string")
    with place.working() as worker, place.client() as client:
        for key in (place.keys.worker(worker.name), place.keys.rq_worker(worker.name), place.keys.leases):
            place.redis.delete(key)
            place.redis.rpush(key, "a list")
        assert client.decide(IMAGE, QUESTIONS).ok


def test_malformed_leases_and_registry_entries_stop_nothing(place: Place) -> None:
    running = place.id("running")
    now = int(time.time())
    forged = {"a:b:c": now - 9, "bad id:e": now - 9, "no-colon": now - 9, f"{running}:not-its-token": now - 9,
              "nobody:t": now - 9, "\x00:\x01": 0, "far:away": now + 10**9, "x" * 300 + ":t": 1}  # fmt: skip
    with place.client() as client:
        client.submit(IMAGE, asking("sleep 0.5"), job_id=running)
        place.redis.zadd(place.keys.leases, forged)
        place.redis.zadd(place.keys.wip, {**forged, "nobody:u": "inf"})  # type: ignore[dict-item]
        place.redis.hset(place.keys.waiting, mapping={"bad id": "x", "gone": "12"})
        place.redis.zadd(place.keys.finished, {"old": 1})
        place.redis.sadd(place.keys.rq_queue_workers, "rq:worker:nobody")
        with place.working():
            result = client.result(running)
            assert (result.status, result.attempts) == ("ok", 1)
    assert place.redis.zcard(place.keys.leases) == place.redis.zcard(place.keys.wip) == 0
    assert place.redis.hlen(place.keys.waiting) == 0
    assert not place.redis.sismember(place.keys.rq_queue_workers, "rq:worker:nobody")
    assert place.redis.zrange(place.keys.finished, 0, -1) == [running]


def test_a_running_job_whose_lease_somebody_deleted_comes_back(place: Place) -> None:
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
        taken(link_to(place, "robbed"))
        place.redis.delete(place.keys.leases)
        with place.working():
            assert client.result(job_id).attempts == 2


def test_a_vanished_payload_is_a_readable_refusal(place: Place) -> None:
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
        place.redis.delete(place.keys.payload(job_id))
        with place.working():
            result = client.result(job_id)
    assert result.status == "invalid" and result.error is not None and "no payload" in result.error.detail


def test_ended_jobs_leave_nothing_that_stays(place: Place) -> None:
    """Every key of a job expires; a worker that left has none."""
    with place.working(), place.client() as client:
        ids = [client.decide(IMAGE, QUESTIONS).job_id for _ in range(3)]
        ids.append(client.submit(IMAGE, asking("sleep 0.2")))
        cancelled = client.submit(IMAGE, QUESTIONS)
        client.cancel(cancelled)
        client.result(ids[-1])
    for job_id in [*ids, cancelled]:
        for key in (place.keys.result(job_id), place.keys.rq_job(job_id), place.keys.stream(job_id)):
            assert 0 < place.redis.ttl(key) <= 3600
    left = {key for key in place.redis.keys(f"*{place.queue}*") if place.redis.ttl(key) == -1}
    assert left <= {place.keys.finished}, "RQ's registry, whose entries have an end each"


def test_the_record_is_the_one_that_every_script_expects(place: Place) -> None:
    assert Protocol(place.keys).keys.queue == f"rq:queue:{place.queue}"
    with place.client() as client:
        record = place.record(client.submit(IMAGE, QUESTIONS))
    assert record[b"data"] == CALL and record[b"status"] == b"queued"
    assert IMAGE[:16] not in b"".join(record.values())
