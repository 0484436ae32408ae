"""What a job's end says: the body of an answer or of a refusal. It knows no queue and no model.

An engine is any object with `Engine`'s members. Nothing here imports ours, which would load torch into `rq info`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from producer import wire
from producer.contract import Request, State
from producer.errors import Code, ErrorBody, Fault, RequestRefused
from producer.result import Status, answer_map


class Question(NamedTuple):
    """One closed question as an engine is asked it: goal and labels are rendered and escaped."""

    name: str
    goal: str
    labels: tuple[str, ...]


class Report(Protocol):
    """Told how far a phase of the start is."""

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None: ...


class StageTimings(Protocol):
    """Milliseconds of a decision's stages."""

    @property
    def prepare_ms(self) -> float: ...
    @property
    def vision_ms(self) -> float: ...
    @property
    def language_ms(self) -> float: ...


class Decision(Protocol):
    """Each question's probabilities over its options, in order."""

    @property
    def probabilities(self) -> Sequence[Sequence[float]]: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def timings(self) -> StageTimings: ...


class Identity(Protocol):
    """What answers: the checkpoint's name and its files' hashes."""

    @property
    def name(self) -> str: ...
    @property
    def hashes(self) -> Mapping[str, str]: ...


class Engine(Protocol):
    """What makes decisions, in two stages: `prepare` of the next request may run in another thread beside
    `decide_prepared`.

    It refuses a request with an exception that has `faults`, `(loc, msg, code)` of each, and says with one that has an
    `exit_code` that its process must end. It may also have `check_image(image, media_type)`, which gives a header's
    faults, `capture_pending(most)`, work that it likes to do while no job waits, and `stats()`, its counts, from any
    thread.
    """

    @property
    def identity(self) -> Identity: ...
    def prepare(self, image: bytes, questions: Sequence[Any], media_type: str | None = None) -> Any: ...
    def decide_prepared(self, prepared: Any) -> Decision: ...
    def warm_up(self, report: Report) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a job ended, as its result hash will say it."""

    status: Status
    body: str
    code: str = ""
    prepare_ms: float | None = None
    vision_ms: float | None = None
    language_ms: float | None = None


def questions_of(request: Request) -> tuple[Question, ...]:
    """A request's questions, in its order."""
    return tuple(Question(name, question.goal, question.labels) for name, question in request.questions.items())


def answered(request: Request, decision: Decision, model: str) -> Outcome:
    """The end of a job that was answered."""
    answers = {
        name: answer_map(dict(zip(question.criteria, probabilities, strict=True)))
        for (name, question), probabilities in zip(request.questions.items(), decision.probabilities, strict=True)
    }
    usage = {"input_tokens": decision.input_tokens, "output_tokens": 0}
    body = json.dumps({"model": model, "answers": answers, "usage": usage}, ensure_ascii=False, allow_nan=False)
    spent = decision.timings
    return Outcome(Status.OK, body, "", spent.prepare_ms, spent.vision_ms, spent.language_ms)


def refused(faults: Sequence[tuple[str, str, str]]) -> Outcome:
    """The end of a job that breaks the contract: `(loc, msg, code)` of each fault."""
    body = ErrorBody.of_faults(Fault(*fault) for fault in faults)
    return Outcome(Status.INVALID, body.to_json(), body.code)


def failed(error: Exception) -> Outcome:
    """The end of a job that the engine failed on. The error's text stays out: it may hold a prompt's."""
    detail = f"the engine failed ({type(error).__name__}); the request is not at fault, submit it again"
    return Outcome(Status.FAILED, ErrorBody(Code.INFERENCE_FAILED, detail).to_json(), Code.INFERENCE_FAILED)


def contract_refused(error: RequestRefused, payload: bytes, engine: Engine) -> Outcome:
    """The end of a job that the contract refuses; the image's own faults are named as well."""
    return refused([*error.errors, *_image_faults(payload, engine)])


def refusal_faults(error: Exception) -> Sequence[tuple[str, str, str]]:
    """The faults for which an engine refuses a request; none if it did not mean to refuse."""
    return tuple(getattr(error, "faults", ()))


def exit_code_of(error: Exception) -> int | None:
    """The process's exit code if the engine cannot go on."""
    code = getattr(error, "exit_code", None)
    return code if isinstance(code, int) else None


def _image_faults(payload: bytes, engine: Engine) -> Sequence[tuple[str, str, str]]:
    """The header faults of a refused request's image, if its bytes can be read at all."""
    check_image = getattr(engine, "check_image", None)
    if check_image is None:
        return ()
    try:
        job: Any = wire.unpack(payload).value
        image = State.model_validate({"image": job["state"]["image"]}).image
    except (RequestRefused, ValueError, TypeError, LookupError):
        return ()
    faults: Sequence[tuple[str, str, str]] = check_image(image.data, image.media_type)
    return faults
