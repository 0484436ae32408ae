"""What every client keeps, real or fake: one test body for `Client`, `AsyncClient` and the clients of `testing`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from producer import (
    AsyncClient,
    Client,
    DuplicateId,
    Job,
    ProducerError,
    QueueFull,
    RequestRefused,
    ResultTimeout,
    UnknownJob,
)
from producer.testing import FakeAsyncClient, FakeClient
from tests.servers import IMAGE, QUESTIONS, Place, asking


class Awaited:
    """An asyncio client for a test body that does not await."""

    def __init__(self, client: Any, runner: asyncio.Runner) -> None:
        self._client, self._runner = client, runner

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self._runner.run(getattr(self._client, name)(*args, **named))


@pytest.fixture(params=["real", "real async", "fake", "fake async"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    with asyncio.Runner() as runner:
        if request.param == "fake":
            yield FakeClient()
        elif request.param == "fake async":
            yield Awaited(FakeAsyncClient(), runner)
        else:
            place = request.getfixturevalue("place")
            with place.working():
                real = place.client() if request.param == "real" else Awaited(place.async_client(), runner)
                yield real
                real.close()


@pytest.fixture
def own(place: Place) -> Callable[[str], str]:
    return place.id


def test_a_decision(client: Any, own: Callable[[str], str]) -> None:
    result = client.decide(IMAGE, QUESTIONS, job_id=own("one"))
    assert result.ok and result.status == "ok" and result.job_id == own("one") and result.error is None
    assert list(result.answers) == list(QUESTIONS)
    for name, answer in result.answers.items():
        assert list(answer.probabilities) == list(QUESTIONS[name]["criteria"])  # type: ignore[call-overload]
        assert sum(answer.probabilities.values()) == pytest.approx(1)
        assert answer.probabilities[answer.choice] == max(answer.probabilities.values())
        assert 0 <= answer.confidence <= 1
    assert result.usage.output_tokens == 0 and result.timings.total_ms >= 0 and result.worker and result.model
    assert client.result(own("one")) == result, "asked again"
    assert client.submit(IMAGE, QUESTIONS, job_id=own("one")) == own("one"), "the same job"
    assert client.cancel(own("one")) is False, "it has ended"
    with pytest.raises(DuplicateId):
        client.submit(IMAGE, asking("other"), job_id=own("one"))


def test_many_come_back_in_the_order_asked_for(client: Any, own: Callable[[str], str]) -> None:
    jobs = [Job(IMAGE + bytes([n]), asking(f"goal {n}"), own(f"job-{n}")) for n in range(4)]
    assert client.submit_many(jobs) == [own(f"job-{n}") for n in range(4)]
    backwards = [own(f"job-{n}") for n in (3, 1, 0, 2)]
    results = client.results(backwards)
    assert [result.job_id for result in results] == backwards and all(result.ok for result in results)
    assert client.submit_many([]) == [] and client.results([]) == []
    ids = client.submit_many([Job(IMAGE, QUESTIONS), Job(IMAGE, QUESTIONS)])
    assert len(set(ids)) == 2, "fresh ids"


def test_what_is_wrong_is_named_the_same(client: Any) -> None:
    with pytest.raises(RequestRefused) as refusal:
        client.decide(IMAGE, {"q": {"type": "score", "instructions": 1, "criteria": {}}})
    assert [fault.loc for fault in refusal.value.errors] == [
        "questions.q.type",
        "questions.q.instructions",
        "questions.q.criteria",
    ]
    with pytest.raises(RequestRefused) as refusal:
        client.submit_many([Job(IMAGE, QUESTIONS), Job(IMAGE, {}), Job(IMAGE, QUESTIONS, "a b")])
    assert [fault.loc for fault in refusal.value.errors] == ["jobs.1.questions", "jobs.2.job_id"]
    for call in (client.result, client.cancel, lambda id: client.results([id])):
        with pytest.raises(RequestRefused, match="job_id"):
            call("a b")
        with pytest.raises(UnknownJob):
            call("never-submitted")
    with pytest.raises(ValueError, match="deadline_s"):
        client.submit(IMAGE, QUESTIONS, deadline_s=0)
    with pytest.raises(FileNotFoundError):
        client.submit("none.png", QUESTIONS)


def test_the_recent_results_are_listed(client: Any, own: Callable[[str], str]) -> None:
    assert client.recent() == []
    results = [client.decide(IMAGE, QUESTIONS, job_id=own(f"job-{n}")) for n in range(3)]
    assert client.recent() == results[::-1], "newest first"
    assert client.recent(2) == results[:0:-1]
    assert client.recent(after=results[0].finished_at) == results[:0:-1]
    assert client.recent(after=results[2].finished_at) == []
    for most in (0, 1001):
        with pytest.raises(ValueError, match="1 to 1000"):
            client.recent(most)
    with pytest.raises(ValueError, match="time zone"):
        client.recent(after=results[0].finished_at.replace(tzinfo=None))


@pytest.mark.parametrize(("real", "fake"), [(Client, FakeClient), (AsyncClient, FakeAsyncClient)])
def test_a_fake_has_the_methods_of_the_real_one(real: type, fake: type) -> None:
    def methods(kind: type) -> dict[str, list[tuple[str, object]]]:
        functions = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: [(each.name, each.default) for each in inspect.signature(function).parameters.values()]
            for name, function in functions
            if not name.startswith("_") or name.endswith(("enter__", "exit__"))
        }

    assert methods(fake) == methods(real)


def test_a_fake_answers_what_it_is_told_and_records_what_it_was_given() -> None:
    with FakeClient({"save": "cancel", "next": {"yes": 0.25, "no": 0.5, "later": 0.25}}) as client:
        result = client.decide(IMAGE, QUESTIONS, deadline_s=7)
    assert result.answers["save"].probabilities == {"ok": 0.0, "cancel": 1.0}
    assert (result.answers["next"].choice, result.answers["save"].confidence) == ("no", 1.0)
    assert 0 < result.answers["next"].confidence < 0.1
    [job] = client.submitted
    assert job.request.image_bytes == IMAGE and list(job.request.questions) == ["save", "next"]
    assert job.request.questions["save"].goal == "Save the file" and job.deadline_s == 7


def test_a_fake_answers_by_a_function_which_may_raise() -> None:
    client = FakeClient(
        lambda image, questions: {name: list(q.criteria)[len(image) % 2] for name, q in questions.items()}
    )
    assert client.decide(b"\x89PNG", asking("x")).answers["q"].choice == "a"
    assert client.decide(b"\x89PNG!", asking("x")).answers["q"].choice == "b"

    def late(image: bytes, questions: object) -> dict[str, str]:
        raise ResultTimeout("job", 5)

    with pytest.raises(ResultTimeout):
        FakeClient(late).decide(IMAGE, QUESTIONS)
    for wrong in ("c", {"a": 1.0}, {"a": 0.5, "b": 0.2}):
        with pytest.raises(ValueError, match="must be one of"):
            FakeClient({"q": wrong}).decide(IMAGE, asking("x"))


def test_a_fake_job_that_nobody_asked_for_can_be_taken_back() -> None:
    client = FakeClient()
    job_id = client.submit(IMAGE, QUESTIONS)
    assert client.cancel(job_id) is True
    result = client.result(job_id)
    assert result.status == "cancelled" and result.error is not None and result.error.code == "cancelled"


def test_many_are_queued_all_or_none(place: Place) -> None:
    taken = place.id("taken")
    with place.client(max_waiting_jobs=3) as client:
        client.submit(IMAGE, QUESTIONS, job_id=taken)
        with pytest.raises(QueueFull):
            client.submit_many([Job(IMAGE, QUESTIONS, place.id(f"n{n}")) for n in range(3)])
        assert place.redis.lrange(place.keys.queue, 0, -1) == [taken]
        with pytest.raises(DuplicateId):
            client.submit_many([Job(IMAGE, QUESTIONS), Job(IMAGE, asking("other"), taken)])
        assert place.redis.lrange(place.keys.queue, 0, -1) == [taken]
        assert client.cancel(taken) is True, "what somebody else submitted stays"


def test_one_timeout_is_over_all_results(place: Place) -> None:
    with place.client() as client:
        ids = client.submit_many([Job(IMAGE, QUESTIONS)] * 3)
        with pytest.raises(ResultTimeout) as error:
            client.results(ids, timeout_s=0.1)
        assert error.value.job_id == ids[0] and isinstance(error.value, TimeoutError)
        with place.working():
            assert [result.ok for result in client.results(ids)] == [True] * 3, "they went on"


def test_every_error_is_of_one_tree() -> None:
    import producer

    errors = [kind for kind in vars(producer).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(errors) >= 8 and all(issubclass(kind, ProducerError) and kind.__doc__ for kind in errors)
