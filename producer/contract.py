"""The contract of a job (section 1) and how its text is rendered (section 3): read this file first.

`parse_request` turns a payload into a `Request` or refuses it, every fault with its place; `build_payload` makes one.
Bytes are `wire`'s matter. What is inside the image file, and how many tokens a prompt has, is the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails

from producer import checks, wire
from producer.errors import Code, Fault, RequestRefused, place
from producer.limits import MAX_OPTIONS, MAX_QUESTION_CHARACTERS, MAX_QUESTIONS

CONTRACT_MODEL = "cua-s1-4b-0.2"
QUESTION_TYPE = "choice"

Text: TypeAlias = str | dict[str, Any] | list[Any] | None


class _Map(BaseModel):
    """A map with exactly these keys. Its `repr` shows no text and no image: it may end up in a log."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)


class Question(_Map):
    """A closed question: what is to be done, and 1 to 26 options of which one is chosen."""

    type: Annotated[
        Literal["choice"],
        checks.constant("type", QUESTION_TYPE, "this model answers no other kind of question"),
    ]
    instructions: Annotated[Text, checks.text("instruction")] = Field(repr=False)
    criteria: Annotated[
        dict[str, Text],
        checks.options(MAX_OPTIONS, "offer the likeliest ones"),
    ] = Field(repr=False)

    @cached_property
    def goal(self) -> str:
        """The prompt's goal: a string as it is, nothing for nil, anything else as JSON."""
        return "" if self.instructions is None else _rendered(self.instructions)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The prompt's labels in request order, escaped as inside a JSON string; a nil label is its key."""
        return tuple(_escaped(_rendered(key if label is None else label)) for key, label in self.criteria.items())

    @model_validator(mode="wrap")
    @classmethod
    def _check_length(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        question: Self = checks.validated(value, handler, _length_findings(value))
        return question


class State(_Map):
    """What the question is about: one screenshot."""

    image: Annotated[checks.ImageFile, checks.image()] = Field(repr=False)


class Request(_Map):
    """One job: a screenshot and 1 to 8 questions about it."""

    model: Annotated[
        Literal["cua-s1-4b-0.2"],
        checks.constant("model", CONTRACT_MODEL, "it names the contract, not a checkpoint"),
    ]
    state: State
    questions: Annotated[
        dict[str, Question],
        checks.entries("question", MAX_QUESTIONS, "send the others as another job"),
    ]

    @property
    def image_bytes(self) -> bytes:
        """The image file's bytes; of a data URL, decoded."""
        return self.state.image.data

    @property
    def image_media_type(self) -> str | None:
        """The data URL's label, `image/png` or `image/jpeg`, which the file must agree with; None for plain bytes."""
        return self.state.image.media_type


def parse_request(payload: bytes) -> Request:
    """Read a job.

    Raises:
        RequestRefused: the payload breaks the contract; all its faults are named.
    """
    return _judged(wire.unpack(payload))


def build_payload(image: bytes | str, questions: Mapping[str, object]) -> bytes:
    """Make a job's payload.

    Args:
        image: the PNG or JPEG file's bytes, or a data URL.
        questions: by name, maps with the keys `type`, `instructions` and `criteria`.

    Raises:
        RequestRefused: `parse_request` would refuse the payload; all its faults are named.
    """
    questions = dict(questions) if isinstance(questions, Mapping) else questions
    job = {"model": CONTRACT_MODEL, "state": {"image": image}, "questions": questions}
    _judged(wire.check(job))
    return wire.pack_checked(job)


def _judged(checked: wire.Checked) -> Request:
    details: list[ErrorDetails] = []
    try:
        request = Request.model_validate(checked.value)
    except ValidationError as error:
        details = error.errors(include_url=False)
    if details or checked.faults:  # outside the `except`: pydantic's error carries the input
        found = (fault for error in details for fault in _faults(error) if fault.loc not in checked.unreadable)
        raise RequestRefused(chain(checked.faults, found))
    return request


def _faults(error: ErrorDetails) -> Iterator[Fault]:
    where = tuple(error["loc"])
    if error["type"] == checks.FINDINGS:
        for finding in error["ctx"][checks.FINDINGS]:
            yield Fault(place((*where, *finding.where)), finding.sentence, finding.code)
    else:
        yield Fault(place(where), _sentence(error, where), Code.INVALID_REQUEST)


def _sentence(error: ErrorDetails, where: wire.Place) -> str:
    """Our words for pydantic's own errors, which are about the keys of maps."""
    if error["type"] == "model_type":
        return checks.not_a_map(error["input"])
    keys = ", ".join(_model_at(where[:-1]).model_fields)
    if error["type"] == "missing":
        return f"the key is missing; the keys here are exactly {keys}: add it"
    assert error["type"] == "extra_forbidden", f"pydantic found {error['type']} at {place(where)}"
    return f"the key is unknown; the keys here are exactly {keys}: remove it"


def _model_at(where: wire.Place) -> type[_Map]:
    if not where:
        return Request
    return State if where == ("state",) else Question


def _length_findings(question: object) -> Iterator[checks.Finding]:
    characters = _prompt_characters(question) if isinstance(question, dict) else 0
    if characters > MAX_QUESTION_CHARACTERS:
        sentence = (
            f"the goal and the escaped labels have {characters:,} characters; at most {MAX_QUESTION_CHARACTERS:,} are "
            "allowed: shorten them"
        )
        yield checks.Finding((), Code.INVALID_REQUEST, sentence)


def _prompt_characters(question: dict[str, Any]) -> int:
    instructions, criteria = question.get("instructions"), question.get("criteria")
    labels = criteria.items() if isinstance(criteria, dict) else ()
    characters = 0 if instructions is None else _characters(instructions, escaped=False)
    return characters + sum(_characters(key if label is None else label, escaped=True) for key, label in labels)


def _characters(text: Any, *, escaped: bool) -> int:
    """The length of a rendered text; 0 for what cannot be rendered, which has a fault of its own."""
    try:
        rendered = _rendered(text)
    except (TypeError, ValueError):
        return 0
    return len(_escaped(rendered) if escaped else rendered)


def _rendered(text: Text) -> str:
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def _escaped(label: str) -> str:
    return json.dumps(label, ensure_ascii=False)[1:-1]
