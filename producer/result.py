"""A job's end as its result hash tells it (contract, section 6), and the answer's body (section 5).

It takes what stands in Redis for data from outside: whatever is not a result is `MalformedResult`. It knows no
connection and no key name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, ValidationError

from producer.errors import ErrorBody, Fault, MalformedResult, place


class Status(StrEnum):
    """How a job ended. Only `ok` carries answers."""

    OK = "ok"
    INVALID = "invalid"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class Answer(_Data):
    """One question's answer: the chosen option's key, every option's probability, and how sure that is.

    `confidence` is `1 - H(probabilities) / ln(options)`, from 0 (all alike) to 1 (one option has it all).
    """

    type: Literal["choice"] = "choice"
    choice: str
    probabilities: dict[str, float]
    confidence: float


def confidence(probabilities: Sequence[float]) -> float:
    """`1 - H(p) / ln(n)`, from 0 (all alike) to 1; 1 for one option (contract, section 5)."""
    if len(probabilities) == 1:
        return 1.0
    entropy = -math.fsum(p * math.log(p) for p in probabilities if p > 0)
    return min(1.0, max(0.0, 1.0 - entropy / math.log(len(probabilities))))


def answer_map(probabilities: Mapping[str, float]) -> dict[str, object]:
    """An `Answer` as a body has it: of every option's probability by its key, in request order."""
    return {
        "type": "choice",
        "choice": max(probabilities, key=probabilities.__getitem__),  # the first of equals: a tie goes to the earliest
        "probabilities": dict(probabilities),
        "confidence": confidence(tuple(probabilities.values())),
    }


class Usage(_Data):
    """Tokens read (the whole prompt of every question, summed) and tokens written (none)."""

    input_tokens: int
    output_tokens: int = 0


class AnswerBody(_Data):
    """The `body` of an answered job."""

    model: str
    answers: dict[str, Answer]
    usage: Usage


# A field that does not apply to a job's end is empty text in its hash.
_Number = Annotated[float | None, BeforeValidator(lambda value: None if value == "" else value)]
_Name = Annotated[str | None, BeforeValidator(lambda value: None if value == "" else value)]
_Time = Annotated[AwareDatetime | None, BeforeValidator(lambda value: None if value == "" else value)]


class Timings(_Data):
    """Where a job's time went, in milliseconds; None for a stage that it never reached."""

    queue_ms: _Number = None
    prepare_ms: _Number = None
    vision_ms: _Number = None
    language_ms: _Number = None
    total_ms: _Number = None


class _Hash(Timings):
    """The result hash's fields."""

    status: Status
    body: str
    model: _Name = None
    worker: _Name = None
    attempts: int = 0
    enqueued_at: _Time = None
    finished_at: _Time = None


class _ErrorPlace(_Data):
    loc: str
    msg: str


class _ErrorBody(_Data):
    code: str
    detail: str
    errors: list[_ErrorPlace]


@dataclass(frozen=True)
class Result:
    """How one job ended.

    `answers` holds an `Answer` by question name, in request order, and is empty unless `status` is `ok`; `error` says
    why then. `model` is what answered, `body` the JSON text of either.
    """

    job_id: str
    status: Status
    body: str = field(repr=False)
    answers: Mapping[str, Answer]
    error: ErrorBody | None
    model: str | None
    usage: Usage | None
    timings: Timings
    worker: str | None
    attempts: int
    enqueued_at: datetime | None
    finished_at: datetime | None

    @property
    def ok(self) -> bool:
        """Whether there are answers."""
        return self.status is Status.OK

    def to_map(self) -> dict[str, object]:
        """All of it, for JSON; `body` parsed."""
        return {
            "job_id": self.job_id,
            "status": self.status,
            "model": self.model,
            "worker": self.worker,
            "attempts": self.attempts,
            "enqueued_at": self.enqueued_at and self.enqueued_at.isoformat(),
            "finished_at": self.finished_at and self.finished_at.isoformat(),
            **self.timings.model_dump(),
            "body": json.loads(self.body),
        }

    @classmethod
    def from_hash(cls, job_id: str, fields: Mapping[bytes, bytes]) -> Result:
        """Read the hash under a result's key, as `HGETALL` gives it.

        Raises:
            MalformedResult: these are not the fields of a result.
        """
        try:
            found = _Hash.model_validate({name.decode(): value.decode() for name, value in fields.items()})
            answer = AnswerBody.model_validate_json(found.body) if found.status is Status.OK else None
            error = None if answer else _ErrorBody.model_validate_json(found.body)
        except (UnicodeDecodeError, ValidationError) as problem:
            raise MalformedResult(job_id, _reason(problem)) from problem
        return cls(
            job_id=job_id,
            status=found.status,
            body=found.body,
            answers=answer.answers if answer else {},
            error=_error(error) if error else None,
            model=found.model,
            usage=answer.usage if answer else None,
            timings=Timings.model_construct(**{name: getattr(found, name) for name in Timings.model_fields}),
            worker=found.worker,
            attempts=found.attempts,
            enqueued_at=found.enqueued_at,
            finished_at=found.finished_at,
        )


def _error(body: _ErrorBody) -> ErrorBody:
    faults = tuple(Fault(error.loc, error.msg, body.code) for error in body.errors)
    return ErrorBody(body.code, body.detail, faults)


def _reason(problem: UnicodeDecodeError | ValidationError) -> str:
    if isinstance(problem, UnicodeDecodeError):
        return "its fields are not UTF-8 text"
    first = problem.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{place(first['loc']) if first['loc'] else 'body'}: {first['msg']}"
