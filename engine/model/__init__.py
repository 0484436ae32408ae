"""The model in plain PyTorch, over the functions of `kernels`: read `language` and `vision` first.

`weights.load_model` reads a checkpoint's files; nothing else here knows their names or layout.
"""

from engine.model.language import LanguageModel
from engine.model.readout import letter_logits, letter_probabilities
from engine.model.state import State
from engine.model.vision import VisionEncoder
from engine.model.weights import Model, load_model
from kernels.segments import Segments

__all__ = [
    "LanguageModel",
    "Model",
    "Segments",
    "State",
    "VisionEncoder",
    "letter_logits",
    "letter_probabilities",
    "load_model",
]
