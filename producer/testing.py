"""Clients without a server, for the tests of programs that use one: the same methods, checks and refusals.

A fake answers a job when its result is asked for; it neither waits nor knows a deadline's end, a full queue or a lost
connection. An answer function may raise what the real client would.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Self, TypeAlias

from producer.contract import Question, Request, parse_request
from producer.errors import Code, DuplicateId, ErrorBody, UnknownJob
from producer.protocol import (
    DEFAULT_DEADLINE_S,
    DEFAULT_RECENT,
    DEFAULT_RESULT_TIMEOUT_S,
    Job,
    Packed,
    Questions,
    checked_count,
    checked_deadline,
    checked_id,
    checked_moment,
    fresh_id,
    packed_jobs,
    payload_of,
)
from producer.result import Result, Status, Timings, answer_map
from producer.screenshot import ImageInput

MODEL = "fake@0"
_EPOCH = datetime.fromtimestamp(0, UTC)

# By question name: the chosen option's key, or every option's probability. A question left out gets its first option.
Answers: TypeAlias = Mapping[str, str | Mapping[str, float]]
AnswerFunction: TypeAlias = Callable[[bytes, Mapping[str, Question]], Answers]


@dataclass(frozen=True)
class SubmittedJob:
    """A job that a fake was given; `request` is what a worker would have read."""

    job_id: str
    request: Request
    deadline_s: float
    payload_sha256: str


class FakeClient:
    """`producer.Client` without a server.

    Args:
        answers: canned answers, or a function of the image's bytes and the questions that gives them.

    `submitted` lists the jobs in order, a repeated submission once.
    """

    def __init__(self, answers: Answers | AnswerFunction | None = None) -> None:
        self.submitted: list[SubmittedJob] = []
        self._answers = answers or {}
        self._results: dict[str, Result] = {}

    def submit(
        self,
        image: ImageInput,
        questions: Questions,
        *,
        job_id: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> str:
        """As `Client.submit`."""
        return self._accept([_packed(image, questions, job_id, deadline_s)])[0]

    def submit_many(self, jobs: Iterable[Job]) -> list[str]:
        """As `Client.submit_many`."""
        return self._accept(packed_jobs(jobs))

    def result(self, job_id: str, timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> Result:
        """As `Client.result`, but at once."""
        job = self._job(job_id)
        if job.job_id not in self._results:
            self._results[job.job_id] = self._answered(job)
        return self._results[job.job_id]

    def results(self, job_ids: Sequence[str], timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> list[Result]:
        """As `Client.results`, but at once."""
        return [self.result(job_id) for job_id in job_ids]

    def decide(
        self,
        image: ImageInput,
        questions: Questions,
        *,
        job_id: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        timeout_s: float | None = None,
    ) -> Result:
        """As `Client.decide`, but at once."""
        return self.result(self.submit(image, questions, job_id=job_id, deadline_s=deadline_s))

    def recent(self, most: int = DEFAULT_RECENT, *, after: datetime | None = None) -> list[Result]:
        """As `Client.recent`; a job ends when its result is asked for, at the time of the fake's clock."""
        after = _EPOCH if after is None else checked_moment(after)
        ended = [each for each in self._results.values() if each.finished_at and each.finished_at > after]
        return ended[::-1][: checked_count(most)]

    def cancel(self, job_id: str) -> bool:
        """As `Client.cancel`; a job whose result was asked for has ended."""
        job = self._job(job_id)
        if job.job_id in self._results:
            return False
        body = ErrorBody(Code.CANCELLED, "cancelled while waiting").to_json()
        self._results[job.job_id] = _ended(job, Status.CANCELLED, body)
        return True

    def close(self) -> None:
        """As `Client.close`: nothing to do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self, packed: Sequence[Packed]) -> list[str]:
        known = {job.job_id: job for job in self.submitted}
        for payload, job_id, deadline_s in packed:
            new = SubmittedJob(job_id, parse_request(payload), deadline_s, hashlib.sha256(payload).hexdigest())
            if known.setdefault(job_id, new).payload_sha256 != new.payload_sha256:
                raise DuplicateId(job_id)
        self.submitted = list(known.values())
        return [job.job_id for job in packed]

    def _job(self, job_id: str) -> SubmittedJob:
        checked_id(job_id)
        for job in self.submitted:
            if job.job_id == job_id:
                return job
        raise UnknownJob(job_id)

    def _answered(self, job: SubmittedJob) -> Result:
        request = job.request
        given = self._answers(request.image_bytes, request.questions) if callable(self._answers) else self._answers
        answers = {
            name: _answer(name, list(question.criteria), given.get(name))
            for name, question in request.questions.items()
        }
        body = {"model": MODEL, "answers": answers, "usage": {"input_tokens": 0, "output_tokens": 0}}
        return _ended(job, Status.OK, json.dumps(body, ensure_ascii=False))


class FakeAsyncClient:
    """`producer.AsyncClient` without a server; arguments and `submitted` as those of `FakeClient`."""

    def __init__(self, answers: Answers | AnswerFunction | None = None) -> None:
        self._fake = FakeClient(answers)

    @property
    def submitted(self) -> list[SubmittedJob]:
        """The jobs in order, a repeated submission once."""
        return self._fake.submitted

    async def submit(
        self,
        image: ImageInput,
        questions: Questions,
        *,
        job_id: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> str:
        """As `FakeClient.submit`."""
        return self._fake.submit(image, questions, job_id=job_id, deadline_s=deadline_s)

    async def submit_many(self, jobs: Iterable[Job]) -> list[str]:
        """As `FakeClient.submit_many`."""
        return self._fake.submit_many(jobs)

    async def result(self, job_id: str, timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> Result:
        """As `FakeClient.result`."""
        return self._fake.result(job_id)

    async def results(self, job_ids: Sequence[str], timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> list[Result]:
        """As `FakeClient.results`."""
        return self._fake.results(job_ids)

    async def decide(
        self,
        image: ImageInput,
        questions: Questions,
        *,
        job_id: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        timeout_s: float | None = None,
    ) -> Result:
        """As `FakeClient.decide`."""
        return self._fake.decide(image, questions, job_id=job_id, deadline_s=deadline_s)

    async def recent(self, most: int = DEFAULT_RECENT, *, after: datetime | None = None) -> list[Result]:
        """As `FakeClient.recent`."""
        return self._fake.recent(most, after=after)

    async def cancel(self, job_id: str) -> bool:
        """As `FakeClient.cancel`."""
        return self._fake.cancel(job_id)

    async def close(self) -> None:
        """As `AsyncClient.close`: nothing to do."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _packed(image: ImageInput, questions: Questions, job_id: str | None, deadline_s: float) -> Packed:
    job_id = fresh_id() if job_id is None else checked_id(job_id)
    return Packed(payload_of(image, questions), job_id, checked_deadline(deadline_s))


def _answer(name: str, keys: Sequence[str], given: str | Mapping[str, float] | None) -> dict[str, object]:
    """The answer's body; a fake that was told to answer what nobody offered is a fault of the test."""
    choice = keys[0] if given is None else given
    told = {key: float(key == choice) for key in keys} if isinstance(choice, str) else choice
    if set(told) != set(keys) or not math.isclose(math.fsum(told.values()), 1.0, abs_tol=1e-6):
        raise ValueError(
            f"the answer to {name!r} is {given!r}; it must be one of {keys}, or their probabilities, sum 1"
        )
    return answer_map({key: told[key] for key in keys})


def _ended(job: SubmittedJob, status: Status, body: str) -> Result:
    fields = {"status": status, "body": body, "model": MODEL if status is Status.OK else "", "worker": "fake"}
    fields["finished_at"] = datetime.now(UTC).isoformat()
    timings = dict.fromkeys(Timings.model_fields, "0")
    return Result.from_hash(job.job_id, {k.encode(): v.encode() for k, v in (fields | timings).items()})
