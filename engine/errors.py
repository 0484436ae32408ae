"""The engine's error tree: what can be wrong with a request, a checkpoint or a device, and what a caller does about it.

A `Refusal` is an answer (the request is at fault, the engine is fine). The others end a worker: their exit codes stand
beside them, so that a supervisor can tell "do not restart me" from "try again".
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class Fault(NamedTuple):
    """One thing wrong with a request.

    `loc` is the place (`state.image`, `questions.save`), `msg` says what was found, what is allowed and what to do,
    `code` is one of the contract's codes.
    """

    loc: str
    msg: str
    code: str


class EngineError(Exception):
    """Everything this package raises on purpose."""


class Refusal(EngineError):
    """The request cannot be answered; every fault found is named. The engine is ready for the next one."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        assert faults, "a refusal names at least one fault"
        super().__init__("; ".join(f"{fault.loc}: {fault.msg}" for fault in faults))
        self.faults = faults


class InferenceError(EngineError):
    """This request could not be computed, through no fault of its own; the engine is ready for the next one."""


class FatalError(EngineError):
    """The process must end; `exit_code` says why."""

    exit_code: ClassVar[int] = 1


class CheckpointError(FatalError):
    """The checkpoint is not what its pin says, or not of this layout. Every mismatch is listed; nothing is loaded."""

    exit_code: ClassVar[int] = 3

    def __init__(self, mismatches: tuple[str, ...] | list[str]) -> None:
        assert mismatches, "a checkpoint error names at least one mismatch"
        self.mismatches = tuple(mismatches)
        super().__init__("\n".join(self.mismatches))


class WarmUpError(FatalError):
    """A warm-up decision did not come out finite, normalised and repeatable: the worker must not take jobs."""

    exit_code: ClassVar[int] = 4


class DeviceError(FatalError):
    """The device is in a state that only a new process clears (a sticky CUDA error)."""

    exit_code: ClassVar[int] = 5
