"""What the language model remembers of the tokens it has seen, so that others can continue from there.

A state stands at one place of one token sequence. It is never changed in place: a run returns a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch


class DeltaState(NamedTuple):
    """Of a gated delta rule layer.

    `conv` are the convolution's last inputs, `[width - 1, C]`, model dtype, oldest first; `memory` is the delta rule's,
    `[V, key_dim, value_dim]`, float32.
    """

    conv: torch.Tensor
    memory: torch.Tensor


class KeyValueState(NamedTuple):
    """Of a full attention layer: every token's rotated keys and values, each `[tokens, KV, d]`, model dtype."""

    keys: torch.Tensor
    values: torch.Tensor


LayerState = DeltaState | KeyValueState


@dataclass(frozen=True)
class State:
    """Every layer's state after `tokens` tokens, in the order of the layers."""

    tokens: int
    layers: tuple[LayerState, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def copy(self) -> State:
        """The same state in memory of its own; a run's state may be views that hold the whole run's memory."""
        return State(self.tokens, tuple(type(layer)(*(tensor.clone() for tensor in layer)) for layer in self.layers))

    def _tensors(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield from layer
