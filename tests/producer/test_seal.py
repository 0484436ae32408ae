"""A fresh id's payload is sent without its digest, which the worker adds: what is known when, and by whom."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import redis

from producer.errors import DuplicateId, ResultTimeout
from producer.protocol import Batch, Pause, Protocol, Steps, payload_of
from producer.result import Result, Status
from producer.scripts import seal
from tests.servers import IMAGE, QUESTIONS, Place, asking, wait_until
from worker.answer import Outcome
from worker.link import Claim, Link, own_client

PAYLOAD = payload_of(IMAGE, QUESTIONS)
SHA256 = hashlib.sha256(PAYLOAD).hexdigest()


def deciding(place: Place) -> Steps[Result]:
    """A client's steps, to be done one by one."""
    return Protocol(place.keys).decide(PAYLOAD, None, 60.0, None)


def do(place: Place, step: Batch | Pause) -> list[Any]:
    assert isinstance(step, Batch)
    with place.raw.pipeline(transaction=step.is_atomic) as pipeline:
        for command in step.commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        return pipeline.execute()


def waiting_id(place: Place) -> str:
    job_id = place.redis.lindex(place.keys.queue, 0)
    assert isinstance(job_id, str)
    return job_id


def end(place: Place, steps: Steps[Result], step: Batch | Pause) -> Result:
    """Do a client's last step."""
    with pytest.raises(StopIteration) as stop:
        steps.send(do(place, step))
    result: Result = stop.value.value
    return result


def taken(place: Place) -> tuple[Link, Claim]:
    """The waiting job in a worker's hand."""
    link = Link(own_client(redis.Redis.from_url(place.url)), place.settings, "w")
    claim = link.take(block=False)
    assert claim is not None
    return link, claim


def finish(link: Link, claim: Claim, status: Status = Status.OK) -> bool:
    body = '{"model": "m", "answers": {}, "usage": {"input_tokens": 1}}'
    if status is not Status.OK:
        body = '{"code": "malformed_payload", "detail": "gone", "errors": []}'
    outcome = Outcome(status, body, "", 1.0, 2.0, 3.0)
    return link.finish(claim, outcome, model="m", state="ready", run_ms=1.0) is not None


async def test_a_result_holds_the_digest_of_what_was_asked(any_place: Place) -> None:
    with any_place.working(), any_place.client() as client:
        ids = [client.decide(IMAGE, QUESTIONS).job_id, client.decide(IMAGE, QUESTIONS, job_id=any_place.id("n")).job_id]
        async with any_place.async_client() as tasks:
            ids.append((result := await tasks.decide(IMAGE, QUESTIONS)).job_id)
        for job_id in ids:
            wait_until(lambda job_id=job_id: any_place.result(job_id)["payload_sha256"] == SHA256, "the digest")
        assert client.submit(IMAGE, QUESTIONS, job_id=result.job_id) == result.job_id, "the same bytes"
        with pytest.raises(DuplicateId):
            client.submit(IMAGE, asking("something else"), job_id=result.job_id)


def test_the_digest_does_not_hold_up_the_result(any_place: Place) -> None:
    place = any_place
    steps = deciding(place)
    wait = steps.send(do(place, next(steps)))
    link, claim = taken(place)
    assert finish(link, claim)
    assert place.result(claim.job_id)["payload_sha256"] == ""
    with place.client() as client, ThreadPoolExecutor(2) as pool:
        same = pool.submit(client.submit, IMAGE, QUESTIONS, job_id=claim.job_id)
        other = pool.submit(client.submit, IMAGE, asking("something else"), job_id=claim.job_id)
        assert end(place, steps, wait).ok, "the answer is there before the digest, and before whoever asks for that"
        time.sleep(0.05)
        assert not same.done() and not other.done()
        link.seal(claim)
        assert place.result(claim.job_id)["payload_sha256"] == SHA256
        assert same.result() == claim.job_id
        with pytest.raises(DuplicateId):
            other.result()
    assert not place.redis.llen(place.keys.queue) and not place.redis.keys(place.keys.staged("*"))


def test_a_digest_that_never_comes_is_not_waited_for_without_end(any_place: Place) -> None:
    """The worker died between the result and its digest."""
    steps = deciding(any_place)
    do(any_place, next(steps))
    link, claim = taken(any_place)
    assert finish(link, claim)
    with any_place.client() as client, pytest.raises(DuplicateId):
        client.submit(IMAGE, QUESTIONS, job_id=claim.job_id)


def test_before_its_digest_a_submission_is_known_by_its_nonce_alone(any_place: Place) -> None:
    place = any_place
    steps = deciding(place)
    submission = next(steps)
    first, again = do(place, submission)[-1], do(place, submission)[-1]
    assert (first[0], again[0]) == (b"queued", b"same"), "asked again after a lost reply"
    job_id = waiting_id(place)
    stranger = next(Protocol(place.keys).submit(PAYLOAD, job_id, 60.0, "another", is_sealed=False))
    assert do(place, stranger)[-1] == [b"duplicate"]
    with place.client() as client, ThreadPoolExecutor(1) as pool:
        with pytest.raises(DuplicateId):
            client.submit(IMAGE, QUESTIONS, job_id=job_id)
        same = pool.submit(client.submit, IMAGE, QUESTIONS, job_id=job_id)
        with place.working():
            assert same.result() == job_id, "it waited for the job's end, and its digest"
    assert do(place, submission)[-1][0] == b"same", "its nonce still holds"
    assert not place.redis.llen(place.keys.queue) and not place.redis.keys(place.keys.staged("*"))


def test_nobody_seals_anothers_job(any_place: Place) -> None:
    place = any_place
    do(place, next(deciding(place)))
    job_id = waiting_id(place)
    other = Protocol(place.keys).decide(payload_of(IMAGE, asking("something else")), job_id, 60.0, None)
    assert isinstance(other.send(do(place, next(other))), Pause)
    do(place, other.throw(KeyboardInterrupt()))
    assert place.redis.hget(place.keys.rq_job(job_id), "payload_sha256") == ""
    assert place.redis.llen(place.keys.queue) == 1


def test_an_end_that_no_worker_wrote_gets_its_digest_from_the_caller(any_place: Place) -> None:
    place = any_place
    with place.client() as client:
        result = client.decide(IMAGE, QUESTIONS, deadline_s=0.05)
        assert (result.status, place.result(result.job_id)["payload_sha256"]) == ("expired", SHA256)
        with pytest.raises(ResultTimeout) as timeout:
            client.decide(IMAGE, QUESTIONS, timeout_s=0.05)
        ended = place.result(str(timeout.value.job_id))
        assert (ended["status"], ended["payload_sha256"]) == ("cancelled", SHA256)


def test_a_payload_that_was_gone_gets_no_digest_from_the_worker(any_place: Place) -> None:
    place = any_place
    steps = deciding(place)
    wait = steps.send(do(place, next(steps)))
    link, claim = taken(place)
    gone = replace(claim, payload=b"")
    assert finish(link, gone, Status.INVALID)
    link.seal(gone)
    assert place.result(claim.job_id)["payload_sha256"] == ""
    assert not end(place, steps, steps.send(do(place, wait))).ok
    assert place.result(claim.job_id)["payload_sha256"] == SHA256


def test_a_digest_makes_no_key_and_replaces_nothing(any_place: Place) -> None:
    place, job_id = any_place, any_place.id("x")
    record, result = place.keys.rq_job(job_id), place.keys.result(job_id)
    command = seal(place.keys, job_id, PAYLOAD)
    place.raw.execute_command(*command)  # type: ignore[no-untyped-call]
    assert not place.redis.exists(record, result)
    place.redis.set(record, "a string")
    place.redis.hset(result, mapping={"payload_sha256": "theirs"})
    place.raw.execute_command(*command)  # type: ignore[no-untyped-call]
    assert place.redis.get(record) == "a string" and place.redis.hgetall(result) == {"payload_sha256": "theirs"}
    place.redis.delete(record)


def test_an_answer_to_a_server_that_lost_its_data_gets_its_digest(any_place: Place) -> None:
    place = any_place
    steps = deciding(place)
    wait = steps.send(do(place, next(steps)))
    link, claim = taken(place)
    assert claim.sha256 == ""
    for key in (*place.redis.keys(f"{place.prefix}*"), place.keys.rq_job(claim.job_id), place.keys.wip):
        place.redis.delete(key)
    assert finish(link, claim)
    link.seal(claim)
    assert place.result(claim.job_id)["payload_sha256"] == SHA256
    assert end(place, steps, wait).ok
