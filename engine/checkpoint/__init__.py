"""Read `verify.py` first: a checkpoint's files, from a download or synthesis to a verified identity.

It owns pins, verification, the merged export and synthetic checkpoints; loading tensors into a model is
`engine.model`'s. `export` and `synthesize` are imported by those who need them.
"""

from engine.checkpoint.paths import CheckpointPaths, open_checkpoint
from engine.checkpoint.pins import Pin, load_pin, published_pin
from engine.checkpoint.report import ProgressReport, Report, silent
from engine.checkpoint.verify import Identity, Verified, verify_checkpoint

__all__ = [
    "CheckpointPaths",
    "Identity",
    "Pin",
    "ProgressReport",
    "Report",
    "Verified",
    "load_pin",
    "open_checkpoint",
    "published_pin",
    "silent",
    "verify_checkpoint",
]
