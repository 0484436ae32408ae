"""A result hash as `redis-cli` shows it becomes a `Result`; anything else becomes `MalformedResult`, never a crash."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.errors import Code, ErrorBody, Fault, MalformedResult, ProducerError
from producer.result import Answer, Result, Status, Timings, Usage
from tests.producer.jobs import reproducible

ANSWER_BODY = {
    "model": "tiny@1234",
    "answers": {
        "z": {"type": "choice", "choice": "b", "probabilities": {"b": 0.75, "a": 0.25}, "confidence": 0.19},
        "a": {"type": "choice", "choice": "only", "probabilities": {"only": 1.0}, "confidence": 1.0},
    },
    "usage": {"input_tokens": 403, "output_tokens": 0},
}
ERROR_BODY = {"code": "image_too_large", "detail": "too large", "errors": [{"loc": "state.image", "msg": "2049x1"}]}


def fields(status: str = "ok", body: object = ANSWER_BODY, **changed: str) -> dict[bytes, bytes]:
    """The hash of a job that ended, as `HGETALL` gives it."""
    texts = {
        "status": status,
        "body": body if isinstance(body, str) else json.dumps(body),
        "model": "tiny@1234",
        "worker": "gpu-box.17",
        "attempts": "1",
        "enqueued_at": "2026-12-01T16:00:34.746974Z",
        "finished_at": "2026-12-01T16:00:34.900000Z",
        "queue_ms": "1.5",
        "prepare_ms": "20.25",
        "vision_ms": "30",
        "language_ms": "40.125",
        "total_ms": "153.026",
        "payload_sha256": "0" * 64,
    } | changed
    return {name.encode(): text.encode() for name, text in texts.items()}


def test_an_answer_is_read() -> None:
    result = Result.from_hash("job-1", fields())
    assert result.job_id == "job-1"
    assert result.status is Status.OK and result.ok
    assert list(result.answers) == ["z", "a"]
    assert result.answers["z"] == Answer(choice="b", probabilities={"b": 0.75, "a": 0.25}, confidence=0.19)
    assert list(result.answers["z"].probabilities) == ["b", "a"]
    assert result.error is None
    assert result.model == "tiny@1234"
    assert result.usage == Usage(input_tokens=403, output_tokens=0)
    assert result.timings == Timings(
        queue_ms=1.5, prepare_ms=20.25, vision_ms=30.0, language_ms=40.125, total_ms=153.026
    )
    assert result.worker == "gpu-box.17"
    assert result.attempts == 1
    assert result.enqueued_at == datetime(2026, 12, 1, 16, 0, 34, 746974, tzinfo=UTC)
    assert result.finished_at == datetime(2026, 12, 1, 16, 0, 34, 900000, tzinfo=UTC)
    assert json.loads(result.body) == ANSWER_BODY


@pytest.mark.parametrize("status", ["invalid", "expired", "failed", "cancelled"])
def test_an_end_without_an_answer_is_read(status: str) -> None:
    result = Result.from_hash("job-1", fields(status, ERROR_BODY))
    assert result.status == status and not result.ok
    assert result.answers == {} and result.usage is None
    assert result.error == ErrorBody(
        "image_too_large", "too large", (Fault("state.image", "2049x1", Code.IMAGE_TOO_LARGE),)
    )


def test_fields_that_do_not_apply_are_none() -> None:
    empty = dict.fromkeys(["model", "worker", "prepare_ms", "vision_ms", "language_ms"], "")
    result = Result.from_hash("job-1", fields("expired", {"code": "expired", "detail": "late", "errors": []}, **empty))
    assert result.model is None and result.worker is None
    assert result.timings == Timings(queue_ms=1.5, total_ms=153.026)
    bare = Result.from_hash("job-1", {b"status": b"ok", b"body": json.dumps(ANSWER_BODY).encode()})
    assert bare.attempts == 0 and bare.enqueued_at is None and bare.timings == Timings()


def test_fields_of_a_later_version_are_ignored() -> None:
    body = ANSWER_BODY | {"more": 1}
    assert Result.from_hash("job-1", fields(body=body, later="x")).ok


def test_an_error_body_is_read_as_it_was_written() -> None:
    written = ErrorBody("decode_failed", 'say "é"\n', (Fault("state.image", "corrupt", "decode_failed"),))
    assert Result.from_hash("job-1", fields("invalid", written.to_json())).error == written
    assert "é" in written.to_json()  # readable in redis-cli
    assert json.loads(written.to_json()) == {
        "code": "decode_failed",
        "detail": 'say "é"\n',
        "errors": [{"loc": "state.image", "msg": "corrupt"}],
    }


@pytest.mark.parametrize(
    ("hashed", "reason"),
    [
        ({}, "status: Field required"),
        ({b"status": b"ok"}, "body: Field required"),
        (fields("done"), "status:"),
        (fields(body="no JSON"), "body: Invalid JSON"),
        (fields(body="[" * 100_000), "body: Invalid JSON"),
        (fields(body=[]), "body:"),
        (fields(body=ERROR_BODY), "model: Field required"),
        (fields("failed", ANSWER_BODY), "code: Field required"),
        (fields(body=ANSWER_BODY | {"answers": {"q": {"choice": 5}}}), "answers.q.choice:"),
        (fields(body=ANSWER_BODY | {"usage": {"input_tokens": "many"}}), "usage.input_tokens:"),
        (fields(queue_ms="soon"), "queue_ms:"),
        (fields(queue_ms="nan"), "queue_ms:"),
        (fields(attempts="1.5"), "attempts:"),
        (fields(enqueued_at="yesterday"), "enqueued_at:"),
        ({b"status": b"\xff"}, "not UTF-8"),
        ({b"\xff": b"ok"}, "not UTF-8"),
    ],
)
def test_anything_else_is_malformed(hashed: dict[bytes, bytes], reason: str) -> None:
    with pytest.raises(MalformedResult, match="job-1") as caught:
        Result.from_hash("job-1", hashed)
    assert reason in str(caught.value)
    assert isinstance(caught.value, ProducerError)


@reproducible
@given(
    st.dictionaries(
        st.sampled_from(sorted(fields())) | st.binary(max_size=5),
        st.binary(max_size=20) | st.sampled_from(sorted(fields().values())),
    )
)
def test_any_hash_is_a_result_or_malformed(hashed: dict[bytes, bytes]) -> None:
    try:
        Result.from_hash("job-1", hashed)
    except MalformedResult as malformed:
        assert len(str(malformed)) < 500
