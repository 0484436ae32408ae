"""What a job's end says."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from engine import errors as engine_errors
from producer.contract import build_payload, parse_request
from producer.result import confidence
from worker.answer import answered, exit_code_of, failed, questions_of, refusal_faults, refused


def decision(*probabilities: tuple[float, ...]) -> Any:
    timings = SimpleNamespace(prepare_ms=1.0, vision_ms=2.0, language_ms=3.0)
    return SimpleNamespace(probabilities=probabilities, input_tokens=7, timings=timings)


def request(**questions: dict[str, object]) -> Any:
    return parse_request(build_payload(b"image", questions))


def question(*keys: str, goal: object = None) -> dict[str, object]:
    return {"type": "choice", "instructions": goal, "criteria": dict.fromkeys(keys)}


def test_an_answer_is_the_contracts_section_5() -> None:
    asked = request(second=question("x", "y", "z"), first=question("only"))
    outcome = answered(asked, decision((0.25, 0.5, 0.25), (1.0,)), "name@rev:folder")
    assert outcome.status == "ok" and outcome.language_ms == 3.0
    expected = 1 - 1.5 * math.log(2) / math.log(3)
    assert outcome.body == json.dumps(
        {
            "model": "name@rev:folder",
            "answers": {
                "second": {
                    "type": "choice",
                    "choice": "y",
                    "probabilities": {"x": 0.25, "y": 0.5, "z": 0.25},
                    "confidence": confidence((0.25, 0.5, 0.25)),
                },
                "first": {"type": "choice", "choice": "only", "probabilities": {"only": 1.0}, "confidence": 1.0},
            },
            "usage": {"input_tokens": 7, "output_tokens": 0},
        }
    )
    assert confidence((0.25, 0.5, 0.25)) == pytest.approx(expected, rel=1e-12)


def test_a_tie_goes_to_the_earliest() -> None:
    outcome = answered(request(q=question("b", "a", "c")), decision((0.4, 0.4, 0.2)), "m")
    assert json.loads(outcome.body)["answers"]["q"]["choice"] == "b"


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [((1.0,), 1.0), ((0.5, 0.5), 0.0), ((1.0, 0.0), 1.0), ((1 / 3, 1 / 3, 1 / 3), 0.0), ((0.9, 0.1), 0.531004406)],
)
def test_confidence(probabilities: tuple[float, ...], expected: float) -> None:
    assert confidence(probabilities) == pytest.approx(expected, abs=1e-9)
    assert 0.0 <= confidence(probabilities) <= 1.0


def test_an_answer_that_does_not_fit_its_request_is_no_answer() -> None:
    with pytest.raises(ValueError, match="zip"):
        answered(request(q=question("a", "b")), decision((1.0,)), "m")
    with pytest.raises(ValueError, match="JSON"):
        answered(request(q=question("a", "b")), decision((float("nan"), 1.0)), "m")


def test_questions_are_asked_rendered_and_escaped() -> None:
    asked = questions_of(
        request(q={"type": "choice", "instructions": {"k": "ä"}, "criteria": {"a": 'say "x"\n', "b": None}})
    )
    assert asked == (("q", '{"k": "ä"}', ('say \\"x\\"\\n', "b")),)


def test_refusals_and_failures() -> None:
    one = refused([("state.image", "bad", "animated")])
    assert json.loads(one.body) == {
        "code": "animated", "detail": "state.image: bad", "errors": [{"loc": "state.image", "msg": "bad"}],
    }  # fmt: skip
    two = refused([("a", "x", "animated"), ("b", "y", "prompt_too_long")])
    assert json.loads(two.body)["code"] == two.code == "invalid_request"
    broken = failed(KeyError("a prompt's text"))
    assert "KeyError" in broken.body and "prompt's" not in broken.body and broken.status == "failed"


def test_the_engines_errors_are_understood() -> None:
    fault = engine_errors.Fault("state.image", "bad", "animated")
    assert refusal_faults(engine_errors.Refusal((fault,))) == (fault,)
    assert exit_code_of(engine_errors.Refusal((fault,))) is None
    codes = [exit_code_of(error) for error in (
        engine_errors.CheckpointError(("x",)), engine_errors.WarmUpError(), engine_errors.DeviceError(), ValueError(),
    )]  # fmt: skip
    assert codes == [3, 4, 5, None]
    assert refusal_faults(ValueError()) == ()
