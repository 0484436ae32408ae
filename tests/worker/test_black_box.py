"""The whole way of a job on a real server, each key as `redis-cli` reads it."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import msgpack
import pytest
import redis

from producer.result import Result, confidence
from tests.servers import IMAGE, QUESTIONS, Place, asking, wait_until
from tests.worker.noop import probabilities_of
from worker.answer import Question

RESULT_FIELDS = {
    "status", "body", "model", "worker", "attempts", "enqueued_at", "finished_at", "queue_ms", "prepare_ms",
    "vision_ms", "language_ms", "total_ms", "payload_sha256",
}  # fmt: skip


def holds_image(place: Place) -> list[bytes]:
    """The keys whose value holds the screenshot."""
    raw = redis.Redis.from_url(place.url)
    dumps = ((key, raw.dump(key)) for key in raw.scan_iter())
    return [key for key, dump in dumps if dump and IMAGE[:64] in dump]


def check_answer(place: Place, result: Result, job_id: str) -> None:
    fields = place.result(job_id)
    assert set(fields) == RESULT_FIELDS
    assert fields["status"] == "ok" and fields["model"] == "noop@0:test" and fields["attempts"] == "1"
    assert (fields["prepare_ms"], fields["vision_ms"], fields["language_ms"]) == ("1.500", "2.250", "3.125")
    assert 0 <= float(fields["queue_ms"]) <= float(fields["total_ms"])
    enqueued, finished = (datetime.fromisoformat(fields[name]) for name in ("enqueued_at", "finished_at"))
    assert abs((finished - enqueued).total_seconds() * 1000 - float(fields["total_ms"])) < 0.01
    assert fields["finished_at"].endswith("Z")
    assert 0 < place.redis.ttl(place.keys.result(job_id)) <= 3600

    body = json.loads(fields["body"])
    assert list(body) == ["model", "answers", "usage"]
    assert body["usage"] == {"input_tokens": len("Save the file"), "output_tokens": 0}
    assert list(body["answers"]) == ["save", "next"]
    expected = probabilities_of(IMAGE, Question("save", "Save the file", ("Save", "cancel")))
    saved = body["answers"]["save"]
    assert saved["type"] == "choice" and saved["probabilities"] == dict(zip(("ok", "cancel"), expected, strict=True))
    assert saved["choice"] == max(saved["probabilities"], key=saved["probabilities"].get)
    assert saved["confidence"] == confidence(expected)
    assert result.job_id == job_id and result.body == fields["body"] and result.worker == fields["worker"]
    assert result.answers["save"].choice == saved["choice"]


def test_a_job_from_submit_to_every_key(any_place: Place) -> None:
    place = any_place
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS, job_id="first_job-1")
        assert job_id == "first_job-1"
        assert place.redis.exists(place.keys.payload(job_id)) and not place.result(job_id)
        with place.working() as worker:
            result = client.result(job_id)
            check_answer(place, result, job_id)
            assert not place.redis.exists(place.keys.payload(job_id)) and holds_image(place) == []

            shown = place.redis.hgetall(place.keys.worker(worker.name))
            assert shown["state"] == "ready" and shown["model"] == "noop@0:test" and shown["gpu"] == "no device"
            assert json.loads(shown["hashes"]) == {"base": "00ff"}
            assert shown["jobs"] == shown["jobs_ok"] == "1" and shown["pid"].isdigit()
            assert datetime.fromisoformat(shown["last_beat"])
            assert 0 < place.redis.ttl(place.keys.worker(worker.name)) <= 30
        assert not place.redis.exists(place.keys.worker(worker.name)), "the worker is gone and so is its key"


async def test_a_job_awaited(any_place: Place) -> None:
    with any_place.working():
        async with any_place.async_client() as client:
            job_id = await client.submit(IMAGE, QUESTIONS)
            assert re.fullmatch("[0-9a-f]{32}", job_id)
            check_answer(any_place, await client.result(job_id), job_id)
            assert (await client.decide(IMAGE, QUESTIONS, job_id=job_id)).job_id == job_id


def test_rq_worker_with_hostile_options_answers(any_place: Place) -> None:
    options = ("-S", "pickle", "-j", "rq.job.Job", "--queue-class", "rq.Queue", "--with-scheduler")
    command = ("worker", "-w", "tests.worker.noop.NoopWorker", "-u", any_place.url, "-n", "w", *options)
    with any_place.process("-m", "rq.cli", *command, any_place.queue) as process, any_place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
        check_answer(any_place, client.result(job_id), job_id)
        process.terminate()
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 0, output
        assert f"job ended id={job_id} status=ok queue_ms=" in output and "attempts=1" in output


def test_answers_under_load_are_the_serial_ones(place: Place) -> None:
    """100 jobs from 8 producers, byte for byte."""
    images = [IMAGE + bytes([number]) for number in range(100)]
    with place.working(), place.client() as shared:
        serial = [shared.decide(image, QUESTIONS).body for image in images]

        def produce(first: int) -> list[tuple[int, str]]:
            with place.client() as client:
                numbers = range(first, 100, 8)
                ids = [(number, client.submit(images[number], QUESTIONS)) for number in numbers]
                return [(number, client.result(job_id).body) for number, job_id in ids]

        with ThreadPoolExecutor(8) as pool:
            loaded = [pair for pairs in pool.map(produce, range(8)) for pair in pairs]
    assert len(loaded) == 100 and len(set(serial)) == 100
    assert all(body == serial[number] for number, body in loaded)


def test_jobs_are_answered_in_the_order_of_submission(place: Place) -> None:
    with place.client() as client:
        ids = [client.submit(IMAGE, asking(f"number {number}")) for number in range(20)]
        with place.working() as worker:
            ends = [client.result(job_id).finished_at for job_id in ids]
    assert ends == sorted(ends)  # type: ignore[type-var]
    assert worker._engine.decided == [f"number {number}" for number in range(20)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("image", "questions", "status", "codes"),
    [
        pytest.param(b"GIF89a", QUESTIONS, "invalid", "unsupported_format", id="the engine refuses the image"),
        pytest.param(IMAGE, asking("refuse"), "invalid", "prompt_too_long", id="the engine refuses the prompt"),
        pytest.param(IMAGE, asking("raise secret prompt text"), "failed", "inference_failed", id="the engine fails"),
    ],
)
def test_a_job_that_is_not_answered(
    place: Place, image: bytes, questions: dict[str, object], status: str, codes: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with place.working() as worker, place.client() as client:
        result = client.decide(image, questions)  # type: ignore[arg-type]
        assert result.status == status and result.error is not None and result.error.code == codes
        assert list(json.loads(result.body)) == ["code", "detail", "errors"]
        assert client.decide(IMAGE, QUESTIONS).ok, "the worker goes on"
        assert place.redis.hget(place.keys.worker(worker.name), f"jobs_{status}") == "1"
        assert not place.redis.exists(place.keys.payload(result.job_id))
    assert "job ended" in caplog.text and "secret prompt text" not in caplog.text + result.body


def test_a_contract_refusal_names_the_images_faults_too(place: Place) -> None:
    payload = _payload({"image": b"GIF89a"}, {"q": {"type": "score", "instructions": None, "criteria": {"a": 1}}})
    with place.working(), place.client() as client:
        result = client.result(place.submit_payload(payload))
    assert result.status == "invalid" and result.error is not None and result.error.code == "invalid_request"
    assert [fault.loc for fault in result.error.errors] == [
        "questions.q.type", "questions.q.criteria.a", "state.image",
    ]  # fmt: skip


def test_a_waiting_client_says_nothing(place: Place) -> None:
    """The wait blocks on the server: it is asked once, not again and again."""

    def asked() -> int:
        stats = place.redis.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("xread", "hgetall", "eval"))

    with place.client() as client, ThreadPoolExecutor(1) as pool:
        job_id = client.submit(IMAGE, QUESTIONS)
        waiting = pool.submit(client.result, job_id)
        wait_until(lambda: place.redis.info("clients")["blocked_clients"] >= 1, "the client to block")
        before = asked()
        time.sleep(0.5)
        after = asked()
        with place.working():
            assert waiting.result().ok
    assert after == before


def _payload(state: dict[str, object], questions: dict[str, object]) -> bytes:
    packed = msgpack.packb({"model": "cua-s1-4b-0.2", "state": state, "questions": questions})
    assert isinstance(packed, bytes)
    return packed
