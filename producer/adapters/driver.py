"""A chooser for the closed-candidate contract of cua-driver's example: one screenshot, a table of candidates, one kind.

Built to the public description of `cua.jev_choice_request_v1` (and `_v2`) and `cua.decision_choice_v1`; nothing of that
project is imported. It selects, it never acts: the caller looks up the id, checks that the capture is still current,
dispatches and verifies. Regions, elements and history are not sent: the model reads the screenshot and the goal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from producer.client import Client
from producer.contract import CONTRACT_MODEL
from producer.errors import ProducerError
from producer.keys import JOB_ID_PATTERN
from producer.limits import MAX_OPTIONS
from producer.result import Answer, Result
from producer.screenshot import ImageInput, fit_screenshot

if TYPE_CHECKING:
    from producer.testing import FakeClient

RESPONSE_SCHEMA = "cua.decision_choice_v1"
CAPTURE_LIFE_S = 60.0
RESERVED_IDS = frozenset({"reobserve", "abstain"})

Kind: TypeAlias = Literal["selected", "reobserve", "abstain", "error"]
Reason: TypeAlias = Literal["invalid_request", "option_limit", "capture_expired", "tie", "model_error"]


class _Candidate(BaseModel):
    id: Annotated[str, Field(min_length=1, max_length=64)]
    description: Annotated[str, Field(min_length=1, max_length=1000)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True)

    schema_: Annotated[Literal["cua.jev_choice_request_v1", "cua.jev_choice_request_v2"], Field(alias="schema")]
    goal: Annotated[str, Field(min_length=1, max_length=4000)]
    capture_id: Annotated[str, Field(min_length=1, max_length=256)]
    candidates: Annotated[list[_Candidate], Field(min_length=2)]


class Decision(NamedTuple):
    """What was chosen for a capture; only `selected` may lead to an action.

    `selected_id` is the chosen candidate's id (None for `error`), `confidence` its probability, `probabilities` those
    of all candidates, `model` what answered, `reason` why there is an `error`.
    """

    kind: Kind
    capture_id: str
    selected_id: str | None = None
    model: str = CONTRACT_MODEL
    confidence: float | None = None
    probabilities: Mapping[str, float] = {}
    reason: Reason | None = None

    def to_wire(self) -> dict[str, Any]:
        """The response as JSON has it."""
        return {"schema": RESPONSE_SCHEMA, **self._asdict(), "probabilities": dict(self.probabilities)}


def choose(
    client: Client | FakeClient, request: Mapping[str, object], screenshot: ImageInput, *, age_s: float = 0.0
) -> Decision:
    """Ask the queue which candidate is next. Whatever goes wrong is an `error`, which dispatches nothing.

    The capture's id becomes the job's (its SHA-256, where it is no job id), so that asking again is the same job; its
    life of 60 s becomes the job's deadline and the wait's end. A second, different question about one capture is an
    `error`: observe again.

    Args:
        request: a `cua.jev_choice_request_v1` or `_v2` map, with the candidates `reobserve` and `abstain`.
        screenshot: the picture of that very capture; one over the limits is shrunk.
        age_s: seconds since the capture.
    """
    try:
        asked = _Request.model_validate(request)
    except ValidationError:
        return Decision("error", str(request.get("capture_id", "")), reason="invalid_request")
    criteria = {candidate.id: candidate.description for candidate in asked.candidates}
    if len(criteria) < len(asked.candidates) or not set(criteria) >= RESERVED_IDS:
        return Decision("error", asked.capture_id, reason="invalid_request")
    if len(criteria) > MAX_OPTIONS:
        return Decision("error", asked.capture_id, reason="option_limit")
    left_s = CAPTURE_LIFE_S - age_s
    if not 0 < left_s <= CAPTURE_LIFE_S:
        return Decision("error", asked.capture_id, reason="capture_expired")
    questions = {"next": {"instructions": asked.goal, "criteria": criteria}}
    try:
        image = fit_screenshot(screenshot).data
        job_id = _job_id(asked.capture_id)
        result = client.decide(image, questions, job_id=job_id, deadline_s=left_s, timeout_s=left_s)
    except (ProducerError, OSError):
        return Decision("error", asked.capture_id, reason="model_error")
    return _decision(asked.capture_id, criteria, result)


def _decision(capture_id: str, criteria: Mapping[str, str], result: Result) -> Decision:
    answer: Answer | None = result.answers.get("next")
    if answer is None or set(answer.probabilities) != set(criteria) or answer.choice not in criteria:
        reason: Reason = "capture_expired" if result.status == "expired" else "model_error"
        return Decision("error", capture_id, reason=reason)
    best, second = sorted(answer.probabilities.values(), reverse=True)[:2]
    if best == second:
        return Decision("error", capture_id, reason="tie")
    kind: Kind = "selected"
    if answer.choice == "reobserve":
        kind = "reobserve"
    elif answer.choice == "abstain":
        kind = "abstain"
    return Decision(kind, capture_id, answer.choice, result.model or CONTRACT_MODEL, best, answer.probabilities)


def _job_id(capture_id: str) -> str:
    return capture_id if JOB_ID_PATTERN.fullmatch(capture_id) else hashlib.sha256(capture_id.encode()).hexdigest()
