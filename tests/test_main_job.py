"""The main job, end to end: a real screenshot through `rq worker` and Redis is answered with the engine's own bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine import Engine, Question, open_checkpoint
from producer import contract
from tests.servers import Place

PAGES = Path(__file__).resolve().parents[1] / "examples/pages"


def test_a_screenshot_through_the_queue_has_the_engines_answer(place: Place, tiny_checkpoint: Path) -> None:
    screenshot = (PAGES / "settings-1280x800.png").read_bytes()
    questions = json.loads((PAGES / "settings-questions.json").read_text())
    rq = str(Path(sys.executable).with_name("rq"))
    command = (rq, "worker", "-w", "worker.GpuWorker", "--url", place.url, "-n", "w", place.queue)
    environment = {"CUA_CHECKPOINT": str(tiny_checkpoint), "CUA_DEVICE": "cpu"}
    with place.process(*command, environment=environment), place.client() as client:
        result = client.decide(screenshot, questions)

    engine = Engine.load(open_checkpoint(tiny_checkpoint), device="cpu")
    parsed = {
        name: contract.Question.model_validate({"type": "choice", **question}) for name, question in questions.items()
    }
    asked = [Question(name, question.goal, question.labels) for name, question in parsed.items()]
    decision = engine.decide(screenshot, asked)

    assert result.status == "ok" and result.model == engine.identity.name
    for question, expected in zip(asked, decision.probabilities, strict=True):
        answer = result.answers[question.name]
        assert tuple(answer.probabilities.values()) == expected
        assert answer.choice == max(answer.probabilities, key=answer.probabilities.__getitem__)
    assert list(result.answers["element"].probabilities) == list(questions["element"]["criteria"])
