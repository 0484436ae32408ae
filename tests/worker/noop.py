"""A worker without a model: its engine answers from the image's and the questions' bytes alone.

Run as a module it is `python -m worker` with this engine. What it does with a question is asked for by the question's
goal: `sleep 0.5`, `raise`, `fatal`, `refuse`, `kill`, or, with NOOP_HANGS set, `hang sleeping` and `hang holding` (the
interpreter's lock).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from worker import __main__ as command_line
from worker.answer import Question, Report
from worker.commands.run import run
from worker.lock import Device
from worker.settings import SettingsError
from worker.worker import GpuWorker

Fault = tuple[str, str, str]
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class NoopIdentity:
    name: str = "noop@0:test"
    hashes: Mapping[str, str] = field(default_factory=lambda: {"base": "00ff"})


@dataclass(frozen=True)
class NoopTimings:
    prepare_ms: float = 1.5
    vision_ms: float = 2.25
    language_ms: float = 3.125


@dataclass(frozen=True)
class NoopDecision:
    probabilities: tuple[tuple[float, ...], ...]
    input_tokens: int
    timings: NoopTimings = NoopTimings()


class Refusal(Exception):
    """As `engine.errors.Refusal`, without torch."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults


class Fatal(Exception):
    """As the fatal errors of `engine.errors`, without torch."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NoopEngine:
    """Probabilities are a function of the bytes asked about."""

    device = "noop"

    def __init__(self) -> None:
        self.identity = NoopIdentity()
        self.decided: list[str] = []

    def warm_up(self, report: Report) -> None:
        report("warm-up", 1, 1)
        fault = os.environ.get("NOOP_WARM_UP")
        if fault == "fail":
            raise Fatal(4, "the warm-up decision did not add up to 1")
        if fault == "pin":
            raise Fatal(3, "the checkpoint is not what its pin says")
        if fault == "usage":
            raise SettingsError("a setting is wrong")

    def check_image(self, image: bytes, media_type: str | None = None) -> tuple[Fault, ...]:
        if image.startswith(PNG):
            return ()
        return (("state.image", "this is no PNG file; send one", "unsupported_format"),)

    def prepare(
        self, image: bytes, questions: Sequence[Question], media_type: str | None = None
    ) -> tuple[bytes, Sequence[Question]]:
        if faults := self.check_image(image, media_type):
            raise Refusal(faults)
        return image, questions

    def decide_prepared(self, prepared: tuple[bytes, Sequence[Question]]) -> NoopDecision:
        return self.decide(*prepared)

    def decide(self, image: bytes, questions: Sequence[Question]) -> NoopDecision:
        self.decided.append(questions[0].goal)
        _obey(questions[0].goal)
        probabilities = tuple(probabilities_of(image, question) for question in questions)
        return NoopDecision(probabilities, sum(len(question.goal) for question in questions))


class LeftOnTheDevice:
    """As a tensor on a lost device: freeing it ends the process."""

    def __del__(self) -> None:
        os.abort()


def probabilities_of(image: bytes, question: Question) -> tuple[float, ...]:
    """Something that changes with every byte."""
    seeds = [hashlib.sha256(image + repr((question.goal, label)).encode()).digest() for label in question.labels]
    weights = [1 + int.from_bytes(seed[:4], "big") for seed in seeds]
    return tuple(weight / sum(weights) for weight in weights)


def _obey(goal: str) -> None:
    match goal.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["raise", *words]:
            raise RuntimeError(" ".join(words))
        case ["refuse"]:
            raise Refusal((("questions.q", "the prompt is too long", "prompt_too_long"),))
        case ["fatal"]:
            if os.environ.get("NOOP_ABORTS"):
                sys.modules["__main__"].left_on_the_device = LeftOnTheDevice()  # type: ignore[attr-defined]
            raise Fatal(5, "the device is gone")
        case ["hang", how, *_] if os.environ.get("NOOP_HANGS"):
            # ctypes.PyDLL keeps the interpreter's lock through the call.
            ctypes.PyDLL(None).sleep(60) if how == "holding" else time.sleep(60)
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)


class NoopWorker(GpuWorker):
    """`GpuWorker` with this engine, on a device of its own unless one is named."""

    def choose_device(self) -> Device:
        name = self.settings.device or f"noop-{self.name}"
        if name == os.environ.get("NOOP_BROKEN"):
            raise Fatal(3, f"the checkpoint for {name} is not what its pin says")
        return Device(name, "no device", name)

    def console(self) -> Report:
        return lambda phase, done_bytes, total_bytes: None

    def load_engine(self, device: Device, report: Report) -> NoopEngine:
        pause_s = float(os.environ.get("NOOP_LOAD_S", "0")) / 4
        for phase in ("verify", "load"):
            for done in (1, 2):
                time.sleep(pause_s)
                report(phase, done, 2)
        return NoopEngine()


def main() -> int:
    parser = command_line.build_parser()
    arguments = parser.parse_args()
    if arguments.func is run:
        arguments.func = partial(
            run, worker_class=NoopWorker, program="tests.worker.noop", list_all=lambda: ["cuda:0", "cuda:1"]
        )
    code: int = arguments.func(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
