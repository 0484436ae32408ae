"""The values of synthetic weights: which distribution a tensor has, and any block of it as bytes.

The distributions keep activations and margins at full size where a trained model's are, so that BF16 and float32 runs
can be compared. A block is a function of seed, tensor name and block number alone (counter-based Philox).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.tensor_files import Tensor

# Values in a block: 4 MiB of float32, which stays in a core's cache.
BLOCK_VALUES = 1 << 20

_Floats: TypeAlias = NDArray[np.float32]
_Fill: TypeAlias = Callable[[np.random.Generator, _Floats], None]


def block_count(tensor: Tensor) -> int:
    """How many blocks a tensor has."""
    return -(-tensor.elements // BLOCK_VALUES)


def block_bytes(tensor: Tensor, block: int, seed: int) -> bytes:
    """Block number `block` of a tensor, in its dtype (`F32` or `BF16`), ready to be written."""
    values = np.empty(min(BLOCK_VALUES, tensor.elements - block * BLOCK_VALUES), dtype=np.float32)
    key = hashlib.sha256(f"{seed}/{tensor.name}/{block}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    _distribution(tensor)(generator, values)
    return values.tobytes() if tensor.dtype == "F32" else _bfloat16(values).tobytes()


def _distribution(tensor: Tensor) -> _Fill:
    name = tensor.name
    if name.endswith(".A_log"):
        return _log_uniform(0.01, 16.0)
    if name.endswith(".dt_bias"):
        return _normal(-4.0, 2.0)
    if name.endswith((".embed_tokens.weight", ".pos_embed.weight")):
        return _normal(0.0, 0.04)
    if name.endswith((".bias", ".lora_B.weight")):
        return _normal(0.0, 0.02)
    if len(tensor.shape) == 1:
        # LayerNorm and the gated norm multiply by the weight, the other RMSNorms by one plus the weight.
        multiplies = name.startswith("model.visual.") or name.endswith(".linear_attn.norm.weight")
        return _normal(1.0 if multiplies else 0.0, 0.1)
    return _normal(0.0, math.prod(tensor.shape[1:]) ** -0.5)


def _normal(mean: float, deviation: float) -> _Fill:
    def fill(generator: np.random.Generator, values: _Floats) -> None:
        generator.standard_normal(out=values, dtype=np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)

    return fill


def _log_uniform(low: float, high: float) -> _Fill:
    """The logarithm of values that are uniform between `low` and `high`."""

    def fill(generator: np.random.Generator, values: _Floats) -> None:
        values[:] = np.log(generator.uniform(low, high, len(values)))

    return fill


def _bfloat16(values: _Floats) -> NDArray[np.uint16]:
    """Finite float32 values as BF16 bit patterns, rounded to nearest, ties to even; `values` is used up."""
    bits = values.view(np.uint32)
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    bits += odd
    bits += np.uint32(0x7FFF)
    bits >>= np.uint32(16)
    return bits.astype(np.uint16)
