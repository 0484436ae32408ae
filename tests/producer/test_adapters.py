"""What other agent projects plug in: the interfaces that they describe, and what must never become an action.

Their packages are not installed here; `system1` below stands for the part of system1-agents that the adapter meets.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from producer import QueueFull, ResultTimeout
from producer.adapters import driver
from producer.adapters.system1 import decision_model
from producer.testing import FakeAsyncClient, FakeClient
from tests.servers import IMAGE, Place, free_port

ROOT = Path(__file__).resolve().parents[2]


class ModelError(Exception):
    def __init__(self, status: str, message: str, cause: Exception | None) -> None:
        super().__init__(message)
        self.status, self.cause = status, cause


@dataclass(frozen=True)
class Usage:
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Reply:
    answers: dict[str, dict[str, Any]]
    latency_ms: int
    usage: Usage = Usage()
    model: str = ""
    raw: dict[str, Any] = field(default_factory=dict)


class DecisionModel:
    """Asks once, and holds the answers to what the interface says of them."""

    async def decide_many(self, observation: Any, questions: dict[str, Any]) -> Reply:
        reply: Reply = await self._decide(observation, questions)  # type: ignore[attr-defined]
        assert list(reply.answers) == list(questions)
        for name, answer in reply.answers.items():
            chances = answer["probabilities"]
            assert set(chances) == set(questions[name].options) and sum(chances.values()) == pytest.approx(1)
            assert chances[answer["choice"]] == max(chances.values()) == answer["confidence"]
        assert isinstance(reply.latency_ms, int) and reply.latency_ms >= 0
        return reply


@pytest.fixture
def system1(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_error(status: str, *, error_msg: str, cause: Exception | None = None) -> ModelError:
        return ModelError(status, error_msg, cause)

    codes = SimpleNamespace(MODEL_SERVICE_CONFIG_ERROR="config", MODEL_CALL_FAILED="call")
    modules: dict[str, dict[str, object]] = {
        "s1a.decision_models.base": {"DecisionModel": DecisionModel},
        "s1a.decision_models.types": {"Reply": Reply, "Usage": Usage},
        "openjiuwen.core.common.exception.codes": {"StatusCode": codes},
        "openjiuwen.core.common.exception.errors": {"build_error": build_error},
    }
    for name, contents in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[name]).update(contents)


def choice(goal: str = "Save", options: Any = None, **more: Any) -> Any:
    plain = {"goal": goal, "rules": (), "operation": "", "options": options or {"save": "Save", "wait": {"for": 1}}}
    return SimpleNamespace(type="choice", **(plain | more))


def seen(*images: bytes) -> Any:
    return SimpleNamespace(state={"app": "Editor"}, images=tuple(SimpleNamespace(data=data) for data in images))


def test_no_adapter_loads_the_other_project() -> None:
    program = "import producer.adapters.system1, producer.adapters.driver, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "producer" in loaded and not loaded & {"s1a", "openjiuwen", "torch", "numpy"}


@pytest.mark.usefixtures("system1")
def test_the_decision_model_says_what_it_is() -> None:
    model = decision_model(FakeAsyncClient())
    assert isinstance(model, DecisionModel)
    assert (model.supports_images, model.question_types, model.deterministic) == (True, {"choice"}, True)
    assert isinstance(model.name, str) and model.model == "cua-s1-4b-0.2" and model.bills_input_tokens is False
    assert all(inspect.iscoroutinefunction(getattr(model, name)) for name in ("warm", "close", "_decide"))


@pytest.mark.usefixtures("system1")
async def test_a_decision_over_a_real_queue(place: Place) -> None:
    with place.working() as worker:
        model = decision_model(place.async_client())
        await model.warm()
        questions = {"first": choice(), "second": choice("Close", {"yes": "Yes", "no": "No", "later": "Later"})}
        reply = await model.decide_many(seen(IMAGE), questions)
        assert reply.model == "noop@0:test" and reply.usage == Usage(len("Save") + len("Close"), 0)
        assert reply.raw["served_by"] == {"checkpoint": "noop@0:test", "worker": worker.name, "source": "response"}
        assert set(reply.raw["server_timing"]) == {"queue", "prepare", "vision", "language", "total"}
        assert place.result(reply.raw["request_id"])["status"] == "ok"
        assert (await model.decide_many(seen(IMAGE), questions)).answers == reply.answers, "deterministic"
        await model.close()


@pytest.mark.usefixtures("system1")
async def test_goal_operation_and_rules_reach_the_prompt() -> None:
    client = FakeAsyncClient()
    model = decision_model(client)
    asked = {
        "goal": choice("Save"),
        "none": choice(""),
        "one": choice("Save", rules=("Be quick",), operation="pick"),
        "two": choice("Save", rules=("a", "b")),
    }
    await model.decide_many(seen(IMAGE), asked)
    request = client.submitted[0].request
    assert request.image_bytes == IMAGE and client.submitted[0].deadline_s == 5.0
    assert request.questions["goal"].goal == "Save" and request.questions["none"].goal == ""
    assert json.loads(request.questions["one"].goal) == {"goal": "Save", "operation": "pick", "rules": "Be quick"}
    assert json.loads(request.questions["two"].goal) == {"goal": "Save", "rules": ["a", "b"]}
    assert dict(request.questions["goal"].criteria) == {"save": "Save", "wait": {"for": 1}}


@pytest.mark.usefixtures("system1")
async def test_what_this_model_cannot_do_is_a_configuration_error_before_anything_is_sent() -> None:
    client = FakeAsyncClient()
    model = decision_model(client)
    for observation, question, found in (
        (seen(), choice(), "0 images"),
        (seen(IMAGE, IMAGE), choice(), "2 images"),
        (seen(IMAGE), choice(options={str(n): "x" for n in range(27)}), "27 options"),
        (seen(IMAGE), SimpleNamespace(type="noul", question="?"), "'noul'"),
    ):
        with pytest.raises(ModelError, match=found) as error:
            await model.decide_many(observation, {"q": question})
        assert error.value.status == "config"
    assert client.submitted == []
    assert await model.decide_many(seen(IMAGE), {"q": choice(options={str(n): "x" for n in range(26)})})


@pytest.mark.usefixtures("system1")
async def test_everything_else_is_a_failed_call(place: Place) -> None:
    def full(image: bytes, questions: object) -> dict[str, str]:
        raise QueueFull("256 jobs wait", 1.0)

    nobody = place.async_client()
    with place.working():
        refusing = decision_model(place.async_client())
        with pytest.raises(ModelError, match="unsupported_format") as error:
            await refusing.decide_many(seen(b"no picture"), {"q": choice()})
        assert error.value.status == "call"
        with pytest.raises(ModelError, match=r"questions\.q\.criteria") as error:
            await refusing.decide_many(seen(IMAGE), {"q": choice(options={"": "x"})})
        assert error.value.status == "call"
        await refusing.close()
    for model, found in (
        (decision_model(FakeAsyncClient(full)), "256 jobs wait"),
        (decision_model(nobody, timeout_s=0.1), "within 0.1 s"),
    ):
        with pytest.raises(ModelError, match=found) as error:
            await model.decide_many(seen(IMAGE), {"q": choice()})
        assert error.value.status == "call" and error.value.cause is not None
    await asyncio.sleep(0)
    await nobody.close()


@pytest.mark.usefixtures("system1")
async def test_a_server_that_never_answers_costs_one_deadline() -> None:
    from producer import AsyncClient

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", port := free_port())
    model = decision_model(AsyncClient(f"redis://127.0.0.1:{port}/0"), timeout_s=0.2)
    started_s = time.monotonic()
    with pytest.raises(ModelError, match=r"within 0\.2 s"):
        await model.decide_many(seen(IMAGE), {"q": choice()})
    with pytest.raises(ModelError, match=r"within 0\.2 s"):
        await model.warm()
    assert time.monotonic() - started_s < 4.0, "a reply is otherwise waited for 15 s"
    server.close()


def captured(*ids: str, **changed: Any) -> dict[str, Any]:
    plain = {
        "schema": "cua.jev_choice_request_v1",
        "goal": "Submit the form.",
        "capture_id": f"capture-{'-'.join(ids)}",
        "regions": [],
        "history": [],
        "candidates": [{"id": name, "description": f"Do {name}."} for name in (*ids, "reobserve", "abstain")],
    }
    return plain | changed


WIRE_KEYS = {"schema", "kind", "capture_id", "selected_id", "model", "confidence", "probabilities", "reason"}


@pytest.mark.parametrize(
    ("chosen", "kind"), [("submit-form", "selected"), ("reobserve", "reobserve"), ("abstain", "abstain")]
)
def test_a_choice_is_one_of_three_kinds_for_its_capture(chosen: str, kind: str) -> None:
    chances = dict.fromkeys(["submit-form", "reobserve", "abstain"], 0.2) | {chosen: 0.6}
    client = FakeClient({"next": chances})
    wire = driver.choose(client, captured("submit-form"), IMAGE_OF_A_SCREEN, age_s=12.5).to_wire()
    assert set(wire) == WIRE_KEYS and json.loads(json.dumps(wire)) == wire
    assert (wire["schema"], wire["kind"], wire["selected_id"]) == ("cua.decision_choice_v1", kind, chosen)
    assert (wire["capture_id"], wire["confidence"], wire["reason"]) == ("capture-submit-form", 0.6, None)
    assert wire["probabilities"] == chances
    [job] = client.submitted
    assert (job.job_id, job.deadline_s) == ("capture-submit-form", 47.5), (
        "the capture's id and what is left of its life"
    )
    assert job.request.questions["next"].goal == "Submit the form."


IMAGE_OF_A_SCREEN = Image.new("RGB", (1280, 800), (250, 250, 250))


def test_a_large_capture_is_shrunk_and_an_odd_capture_id_is_hashed() -> None:
    client = FakeClient()
    screen = Image.new("RGB", (3840, 2160))
    decision = driver.choose(
        client, captured("a", schema="cua.jev_choice_request_v2", capture_id="win 1:cap/2"), screen
    )
    assert decision.kind == "selected" and decision.capture_id == "win 1:cap/2"
    assert client.submitted[0].job_id == hashlib.sha256(b"win 1:cap/2").hexdigest()


@pytest.mark.parametrize(
    ("request_", "answers", "age_s", "reason"),
    [
        (captured("a"), {"next": {"a": 0.4, "reobserve": 0.4, "abstain": 0.2}}, 0.0, "tie"),
        (captured(*(f"c{n}" for n in range(25))), None, 0.0, "option_limit"),
        (captured("a"), None, 60.0, "capture_expired"),
        (captured("a"), None, float("nan"), "capture_expired"),
        (captured("a", candidates=[{"id": "a", "description": "x"}] * 2), None, 0.0, "invalid_request"),
        (captured("a", "a"), None, 0.0, "invalid_request"),
        (captured("a", goal=5), None, 0.0, "invalid_request"),
        (captured("a", schema="another"), None, 0.0, "invalid_request"),
        ({}, None, 0.0, "invalid_request"),
        (captured("a", goal="<|image_pad|>"), None, 0.0, "model_error"),
    ],
)
def test_whatever_is_wrong_is_an_error_that_selects_nothing(
    request_: dict[str, Any], answers: Any, age_s: float, reason: str
) -> None:
    client = FakeClient(answers)
    decision = driver.choose(client, request_, IMAGE_OF_A_SCREEN, age_s=age_s)
    assert (decision.kind, decision.reason) == ("error", reason)
    assert decision.selected_id is None and decision.confidence is None and decision.probabilities == {}
    assert decision.capture_id == request_.get("capture_id", "")
    assert bool(client.submitted) == (reason == "tie")


def test_a_missing_answer_is_an_error() -> None:
    def late(image: bytes, questions: object) -> dict[str, str]:
        raise ResultTimeout("job", 60)

    assert driver.choose(FakeClient(late), captured("a"), IMAGE_OF_A_SCREEN).kind == "error"
    assert driver.choose(FakeClient(), captured("a"), b"no picture").reason == "model_error"
    client = FakeClient()
    request_ = captured("a")
    first = driver.choose(client, request_, IMAGE_OF_A_SCREEN)
    assert driver.choose(client, request_, IMAGE_OF_A_SCREEN) == first, "asking again is the same job"
    assert driver.choose(client, captured("a", goal="Another"), IMAGE_OF_A_SCREEN).reason == "model_error"
    cancelled = FakeClient()
    cancelled.submit(IMAGE, {"next": {"instructions": "x", "criteria": {"a": None}}}, job_id="capture-a")
    assert driver.choose(cancelled, request_, IMAGE_OF_A_SCREEN).kind == "error", "somebody else's id"


def test_a_choice_over_a_real_queue(place: Place) -> None:
    request_ = captured("a", capture_id=place.id("capture"))
    with place.client() as client:
        expired = driver.choose(client, request_ | {"capture_id": place.id("old")}, IMAGE_OF_A_SCREEN, age_s=59.95)
        assert (expired.kind, expired.reason) in (("error", "capture_expired"), ("error", "model_error"))
        with place.working():
            decision = driver.choose(client, request_, IMAGE_OF_A_SCREEN)
            assert decision.kind in ("selected", "reobserve", "abstain") and decision.model == "noop@0:test"
            assert client.result(place.id("capture")).ok
