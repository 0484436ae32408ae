"""A decision model for system1-agents: its closed choices over one screenshot, asked on this queue.

Built to the public interface (`s1a.decision_models`); that project is imported when a model is made, not before. The
observation's text is not sent: the model reads the screenshot, the question and its options.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from producer.aio import AsyncClient
from producer.contract import CONTRACT_MODEL, QUESTION_TYPE
from producer.errors import ProducerError, UnknownJob
from producer.limits import MAX_OPTIONS
from producer.protocol import fresh_id
from producer.result import Answer, Result

if TYPE_CHECKING:
    from producer.testing import FakeAsyncClient

DEFAULT_TIMEOUT_S = 5.0


def decision_model(client: AsyncClient | FakeAsyncClient, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """A `s1a.decision_models.DecisionModel` that owns `client` from now on and closes it.

    A decision, from connecting to its answer, takes at most `timeout_s` seconds; one that takes longer is taken back.
    An answer's `confidence` is the chosen option's probability, as that project counts it.

    Raises of a decision, that project's errors:
        MODEL_SERVICE_CONFIG_ERROR: not exactly one image, over 26 options, or a question that is no choice.
        MODEL_CALL_FAILED: anything else: no server, no answer in time, a refusal, a job that failed.

    Raises:
        ImportError: system1-agents is not installed.
    """
    from openjiuwen.core.common.exception.codes import StatusCode
    from openjiuwen.core.common.exception.errors import build_error
    from s1a.decision_models.base import DecisionModel
    from s1a.decision_models.types import Reply, Usage

    def configuration_error(sentence: str) -> Exception:
        error: Exception = build_error(StatusCode.MODEL_SERVICE_CONFIG_ERROR, error_msg=sentence)
        return error

    def failed_call(sentence: str, cause: Exception | None = None) -> Exception:
        error: Exception = build_error(StatusCode.MODEL_CALL_FAILED, cause=cause, error_msg=sentence)
        return error

    async def in_time(call: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await _within(timeout_s, call)
        except TimeoutError as error:  # `ResultTimeout` is one
            raise failed_call(f"no decision within {timeout_s:g} s; is a worker ready?", error) from error
        except UnknownJob:
            raise
        except ProducerError as error:
            raise failed_call(str(error), error) from error

    class ScreenshotQueueModel(DecisionModel):  # type: ignore[misc]
        name = "screenshot-queue"
        supports_images = True
        question_types = frozenset({QUESTION_TYPE})
        deterministic = True
        bills_input_tokens = False

        @property
        def model(self) -> str:
            return CONTRACT_MODEL

        async def warm(self) -> None:
            """Fails when the server cannot be asked."""
            with contextlib.suppress(UnknownJob):
                await in_time(client.result(fresh_id(), timeout_s))

        async def close(self) -> None:
            await client.close()

        async def _decide(self, observation: Any, questions: Mapping[str, Any]) -> Any:
            if fault := _unsupported(observation, questions):
                raise configuration_error(fault)
            asked = {name: _question(question) for name, question in questions.items()}
            started_s = time.perf_counter()
            image = observation.images[0].data
            result = await in_time(client.decide(image, asked, deadline_s=timeout_s, timeout_s=timeout_s))
            latency_ms = round((time.perf_counter() - started_s) * 1000)
            if result.error is not None:
                raise failed_call(f"the job ended as {result.status}: {result.error.code}: {result.error.detail}")
            answers = {name: _answer(answer) for name, answer in result.answers.items()}
            tokens = result.usage.model_dump() if result.usage else {}
            raw = {"model": result.model, "answers": answers, "usage": tokens, **_provenance(result)}
            return Reply(answers=answers, latency_ms=latency_ms, usage=Usage(**tokens), model=result.model, raw=raw)

    return ScreenshotQueueModel()


async def _within(timeout_s: float, call: Coroutine[Any, Any, Result]) -> Result:
    """The call's result; at the time out, or when this task is cancelled, the call is told to take its job back.

    That is not waited for: it, too, needs the server.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


def _unsupported(observation: Any, questions: Mapping[str, Any]) -> str | None:
    if len(observation.images) != 1:
        return f"the observation has {len(observation.images)} images; this model needs exactly one screenshot"
    for name, question in questions.items():
        if question.type != QUESTION_TYPE:
            return f"question {name!r} is of type {question.type!r}; this model answers {QUESTION_TYPE!r} only"
        if len(question.options) > MAX_OPTIONS:
            return f"question {name!r} has {len(question.options)} options; this model takes at most {MAX_OPTIONS}"
    return None


def _question(question: Any) -> dict[str, object]:
    """A goal alone is the prompt's goal as it stands; with an operation or rules they become one map."""
    rules = list(question.rules)
    more = {"operation": question.operation, "rules": rules[0] if len(rules) == 1 else rules}
    said = {name: text for name, text in {"goal": question.goal, **more}.items() if text}
    instructions = said if set(said) - {"goal"} else question.goal or None
    return {"type": QUESTION_TYPE, "instructions": instructions, "criteria": dict(question.options)}


def _answer(answer: Answer) -> dict[str, object]:
    return {
        "choice": answer.choice,
        "probabilities": answer.probabilities,
        "confidence": answer.probabilities[answer.choice],
    }


def _provenance(result: Result) -> dict[str, object]:
    """Who answered and where the time went, in milliseconds by stage."""
    stages = {name.removesuffix("_ms"): ms for name, ms in result.timings.model_dump().items() if ms is not None}
    return {
        "served_by": {"checkpoint": result.model, "worker": result.worker, "source": "response"},
        "request_id": result.job_id,
        "server_timing": stages,
    }
