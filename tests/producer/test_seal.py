"""A fresh id's payload is sent without its digest, which follows with the wait: what is known when, and by whom."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import redis

from producer.errors import DuplicateId
from producer.protocol import Batch, Pause, Protocol, Steps, payload_of
from producer.result import Result, Status
from producer.scripts import seal
from tests.servers import IMAGE, QUESTIONS, Place, asking, wait_until
from worker.answer import Outcome
from worker.link import Link, own_client

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


async def test_a_result_holds_the_digest_of_what_was_asked(any_place: Place) -> None:
    with any_place.working(), any_place.client() as client:
        assert any_place.result(client.decide(IMAGE, QUESTIONS).job_id)["payload_sha256"] == SHA256
        named = client.decide(IMAGE, QUESTIONS, job_id=any_place.id("named"))
        assert any_place.result(named.job_id)["payload_sha256"] == SHA256
        async with any_place.async_client() as tasks:
            result = await tasks.decide(IMAGE, QUESTIONS)
        assert any_place.result(result.job_id)["payload_sha256"] == SHA256
        assert client.submit(IMAGE, QUESTIONS, job_id=result.job_id) == result.job_id, "the same bytes"
        with pytest.raises(DuplicateId):
            client.submit(IMAGE, asking("something else"), job_id=result.job_id)


@pytest.mark.parametrize("is_first", [True, False], ids=["before the end", "after the end"])
def test_the_digest_may_come_before_or_after_the_end(any_place: Place, is_first: bool) -> None:
    place = any_place
    steps = deciding(place)
    wait = steps.send(do(place, next(steps)))
    job_id = waiting_id(place)
    assert isinstance(wait, Batch)
    assert place.redis.hget(place.keys.rq_job(job_id), "payload_sha256") == ""
    if is_first:
        do(place, Batch(wait.commands[:1]))
        assert place.redis.hget(place.keys.rq_job(job_id), "payload_sha256") == SHA256
    with place.working():
        wait_until(lambda: place.result(job_id), "the end")
        assert place.result(job_id)["payload_sha256"] == (SHA256 if is_first else "")
    assert end(place, steps, wait).ok
    assert place.result(job_id)["payload_sha256"] == SHA256


def test_before_its_digest_a_submission_is_known_by_its_nonce_alone(any_place: Place) -> None:
    place = any_place
    steps = deciding(place)
    submission = next(steps)
    first, again = do(place, submission)[-1], do(place, submission)[-1]
    assert (first[0], again[0]) == (b"queued", b"same"), "asked again after a lost reply"
    job_id = waiting_id(place)
    wait = steps.send([again])
    with place.client() as client:
        for _ in ("the same bytes", "and an empty digest is none"):
            with pytest.raises(DuplicateId):
                client.submit(IMAGE, QUESTIONS, job_id=job_id)
        stranger = next(Protocol(place.keys).submit(PAYLOAD, job_id, 60.0, "another", is_sealed=False))
        assert do(place, stranger)[-1] == [b"duplicate"]
        assert place.redis.llen(place.keys.queue) == 1 and not place.redis.keys(place.keys.staged("*"))
        assert isinstance(wait, Batch)
        do(place, Batch(wait.commands[:1]))
        assert client.submit(IMAGE, QUESTIONS, job_id=job_id) == job_id
        assert do(place, submission)[-1][0] == b"same", "its nonce still holds"
    assert place.redis.llen(place.keys.queue) == 1


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


def test_an_answer_to_a_server_that_lost_its_data_brings_its_own_digest(any_place: Place) -> None:
    """The digest came after the worker had the job, and was lost with the rest."""
    place = any_place
    link = Link(own_client(redis.Redis.from_url(place.url)), place.settings, "w")
    steps = deciding(place)
    wait = steps.send(do(place, next(steps)))
    claim = link.take(block=False)
    assert claim is not None and claim.sha256 == ""
    for key in (*place.redis.keys(f"{place.prefix}*"), place.keys.rq_job(claim.job_id), place.keys.wip):
        place.redis.delete(key)
    body = '{"model": "m", "answers": {}, "usage": {"input_tokens": 1}}'
    outcome = link.finish(claim, Outcome(Status.OK, body, "", 1.0, 2.0, 3.0), model="m", state="ready", run_ms=1.0)
    assert outcome is not None and outcome.status == "ok"
    assert place.result(claim.job_id)["payload_sha256"] == SHA256
    assert end(place, steps, wait).ok
