"""Screenshot and closed questions in, probabilities out. Read `engine.py` first.

The names here are what a program without our queue needs: open a checkpoint, load an engine, decide.
"""

from engine.checkpoint import CheckpointPaths, Identity, open_checkpoint, verify_checkpoint
from engine.engine import Decision, Engine, Stats, Timings
from engine.errors import (
    CheckpointError,
    DeviceError,
    EngineError,
    FatalError,
    Fault,
    InferenceError,
    Refusal,
    WarmUpError,
)
from engine.prepared import Prepared
from engine.prompt import Question

__all__ = [
    "CheckpointError",
    "CheckpointPaths",
    "Decision",
    "DeviceError",
    "Engine",
    "EngineError",
    "FatalError",
    "Fault",
    "Identity",
    "InferenceError",
    "Prepared",
    "Question",
    "Refusal",
    "Stats",
    "Timings",
    "WarmUpError",
    "open_checkpoint",
    "verify_checkpoint",
]
