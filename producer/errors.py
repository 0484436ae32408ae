"""The producer's error tree and the one form of a refusal: what was wrong, where, under which of the contract's codes.

Worker and producer share these: the body that stands in Redis for a job that was not answered is `ErrorBody.to_json()`.
Nothing here repeats a request's text beyond short, escaped names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import ClassVar, NamedTuple

# A hostile request can hold 100,000 faults; this many are named, and that there are more.
MAX_NAMED_FAULTS = 256
MAX_SHOWN_CHARACTERS = 64
MAX_SHOWN_PLACE_PARTS = 12


class Code(StrEnum):
    """The contract's codes (section 6)."""

    MALFORMED_PAYLOAD = "malformed_payload"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_FORMAT = "unsupported_format"
    IMAGE_TOO_LARGE = "image_too_large"
    ASPECT_RATIO = "aspect_ratio"
    MULTI_PICTURE = "multi_picture"
    ANIMATED = "animated"
    MIME_MISMATCH = "mime_mismatch"
    DECODE_FAILED = "decode_failed"
    PROMPT_TOO_LONG = "prompt_too_long"
    DUPLICATE_ID = "duplicate_id"
    QUEUE_FULL = "queue_full"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    INFERENCE_FAILED = "inference_failed"
    WORKER_LOST = "worker_lost"


class Fault(NamedTuple):
    """One thing wrong with a request.

    `loc` is the place (`questions.save.criteria.ok`), `msg` says what was found, what is allowed and what to do, `code`
    is one of `Code`.
    """

    loc: str
    msg: str
    code: str


@dataclass(frozen=True)
class ErrorBody:
    """The `body` of a job that was not answered: `{"code", "detail", "errors": [{"loc", "msg"}]}`.

    `errors` is empty where no part of the request is at fault (`expired`, `worker_lost`).
    """

    code: str
    detail: str
    errors: tuple[Fault, ...] = ()

    @classmethod
    def of_faults(cls, faults: Iterable[Fault]) -> ErrorBody:
        """The body that refuses a request for these faults, of which there is at least one.

        `code` is the code that all of them share, `invalid_request` where they differ.
        """
        found = tuple(islice(faults, MAX_NAMED_FAULTS + 1))
        assert found, "a refusal names at least one fault"
        codes = {fault.code for fault in found}
        code = str(codes.pop()) if len(codes) == 1 else str(Code.INVALID_REQUEST)
        first = f"{found[0].loc}: {found[0].msg}"
        if len(found) == 1:
            return cls(code, first, found)
        if len(found) <= MAX_NAMED_FAULTS:
            return cls(code, f"{len(found)} faults; the first: {first}", found)
        more = Fault(place(()), f"there are more faults than these {MAX_NAMED_FAULTS}; mend them first", code)
        return cls(code, f"over {MAX_NAMED_FAULTS} faults; the first: {first}", (*found[:MAX_NAMED_FAULTS], more))

    def to_json(self) -> str:
        """The body as JSON text, in the contract's form."""
        errors = [{"loc": fault.loc, "msg": fault.msg} for fault in self.errors]
        return json.dumps({"code": self.code, "detail": self.detail, "errors": errors}, ensure_ascii=False)


class ProducerError(Exception):
    """Everything this package raises on purpose."""


class RequestRefused(ProducerError):
    """The request breaks the contract; every fault found is named. Mend the request: the same one is refused again."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.body = ErrorBody.of_faults(faults)
        super().__init__("; ".join(f"{fault.loc}: {fault.msg}" for fault in self.body.errors))

    @property
    def code(self) -> str:
        """The faults' common code, `invalid_request` where they differ."""
        return self.body.code

    @property
    def detail(self) -> str:
        """One sentence for a person."""
        return self.body.detail

    @property
    def errors(self) -> tuple[Fault, ...]:
        """Every fault, each with its place."""
        return self.body.errors


class DuplicateId(ProducerError):
    """The id belongs to a job with other bytes, which stays untouched. Choose another id, or none."""

    code: ClassVar[str] = Code.DUPLICATE_ID

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job id {shown(job_id)} belongs to a job with other bytes; use another id, or leave it out")
        self.job_id = job_id


class QueueFull(ProducerError):
    """The queue takes no more for now; nothing was stored. Try again after `retry_after_s` seconds."""

    code: ClassVar[str] = Code.QUEUE_FULL

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(f"{detail}; try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class UnknownJob(ProducerError):
    """The server holds neither a job nor a result under this id: never submitted, or its result has expired."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"no job {shown(job_id)}: it was never submitted here, or its result has expired")
        self.job_id = job_id


class ResultTimeout(ProducerError, TimeoutError):
    """No result within `timeout_s` seconds. The job goes on: ask again, or let its deadline end it."""

    def __init__(self, job_id: str, timeout_s: float) -> None:
        super().__init__(f"job {shown(job_id)} has no result after {timeout_s:g} s; it goes on, ask again")
        self.job_id = job_id
        self.timeout_s = timeout_s


class MalformedResult(ProducerError):
    """What stands under the result's key is not a result of this contract (a foreign writer, another version)."""

    def __init__(self, job_id: str, detail: str) -> None:
        super().__init__(f"the result of job {shown(job_id)} cannot be read: {detail}")
        self.job_id = job_id


class ServerUnavailable(ProducerError):
    """The Redis server cannot be reached or refuses to serve. `detail` names it without its password."""


def shown(text: str) -> str:
    """A name as it may stand in a message: quoted, escaped to ASCII, at most 64 characters of it."""
    if len(text) > MAX_SHOWN_CHARACTERS:
        return json.dumps(text[:MAX_SHOWN_CHARACTERS])[:-1] + '..."'
    return json.dumps(text)


def place(parts: Sequence[str | int]) -> str:
    """A place in a request, `questions.save.criteria.ok`; odd or long names are quoted and shortened.

    The whole request is `payload`.
    """
    names = [_place_part(part) for part in parts[:MAX_SHOWN_PLACE_PARTS]]
    if len(parts) > MAX_SHOWN_PLACE_PARTS:
        names.append("...")
    return ".".join(names) or "payload"


def _place_part(part: str | int) -> str:
    if isinstance(part, int):
        return str(part)
    plain = 0 < len(part) <= MAX_SHOWN_CHARACTERS and part.isprintable() and part == part.strip()
    plain = plain and not set(part) & set('."\\')
    return part if plain else shown(part)
