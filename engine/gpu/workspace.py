"""The fixed device memory that a request runs in, so that a captured graph finds its inputs where it left them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch

from engine.config import TextConfig
from engine.model import State
from engine.model.state import DeltaState, KeyValueState, LayerState
from engine.prompt import MAX_OPTIONS, MAX_PROMPT_TOKENS
from kernels.layout import MAX_SUFFIXES, Layout

Tensor = torch.Tensor


@dataclass(frozen=True)
class SavedState:
    """A state in memory of its own, exactly as long as its tokens."""

    state: State

    @property
    def size_bytes(self) -> int:
        """Bytes on the device."""
        return self.state.size_bytes


class Workspace:
    """The state that passes continue from, and the image's rows.

    `state` has room for the longest prompt's keys and values; only its first tokens mean anything. Passes write the
    state at their prefix's end into it. `features` are the image's rows `[MAX_PROMPT_TOKENS, D]`.
    """

    def __init__(self, config: TextConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        layers = tuple(_empty_layer(config, kind, device, dtype) for kind in config.layer_types)
        self.state = State(0, layers)
        self.features = torch.zeros(MAX_PROMPT_TOKENS, config.hidden_size, device=device, dtype=dtype)

    def reset(self) -> None:
        """A prompt's beginning."""
        for tensor in chain.from_iterable(self.state.layers):
            tensor.zero_()

    def load(self, saved: SavedState) -> None:
        """Continue from a saved state."""
        _copy_all(self._parts(saved.state.tokens), list(chain.from_iterable(saved.state.layers)))

    def keep_convolutions(self, end: State) -> None:
        """Take over the part of a pass's end that it could not write in place."""
        ours = [layer.conv for layer in self.state.layers if isinstance(layer, DeltaState)]
        theirs = [layer.conv for layer in end.layers if isinstance(layer, DeltaState)]
        _copy_all(ours, theirs)

    def save(self, tokens: int) -> SavedState:
        """A copy of the state, which stands after `tokens` tokens."""
        parts = self._parts(tokens)
        copies = [torch.empty_like(part) for part in parts]
        _copy_all(copies, parts)
        pairs = zip(copies[::2], copies[1::2], strict=True)
        layers = [type(layer)(*pair) for layer, pair in zip(self.state.layers, pairs, strict=True)]
        return SavedState(State(tokens, tuple(layers)))

    def saved_bytes(self, tokens: int) -> int:
        """What `save` would take."""
        return sum(part.nbytes for part in self._parts(tokens))

    def _parts(self, tokens: int) -> list[Tensor]:
        return [
            part[:tokens] if isinstance(layer, KeyValueState) else part for layer in self.state.layers for part in layer
        ]


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensor by tensor in few launches: those of one dtype go together."""
    for dtype in {target.dtype for target in targets}:
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _empty_layer(config: TextConfig, kind: str, device: torch.device, dtype: torch.dtype) -> LayerState:
    if kind == "full_attention":
        shape = (MAX_PROMPT_TOKENS, config.num_key_value_heads, config.head_dim)
        return KeyValueState(*(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)))
    memory = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return DeltaState(
        torch.zeros(config.linear_conv_kernel_dim - 1, config.linear_conv_size, device=device, dtype=dtype),
        torch.zeros(memory, device=device, dtype=torch.float32),
    )


class PassInputs:
    """What changes from pass to pass of one capacity, in one int32 buffer that one copy fills.

    `ids`, `image_tokens` `[rows]` and `positions` `[3, rows]` as in `engine.Prepared`; `options` `[MAX_SUFFIXES]`
    counts the letters of each question, 1 for none; `layout` are the pass's tables.
    """

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self.rows = rows
        sizes = [Layout.size(rows), rows, rows, 3 * rows, MAX_SUFFIXES]
        self.numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        table, self.ids, self.image_tokens, positions, self.options = torch.split(self.numbers, sizes)
        self.layout = Layout.over(rows, table)
        self.positions = positions.view(3, rows)

    def fill(self, staging: Staging) -> None:
        """Copy what was staged, without waiting; the staging is free again when the stream has come by."""
        self.numbers.copy_(staging.numbers, non_blocking=True)


class Staging:
    """Pinned memory beside the inputs of one pass and its answer.

    It is never given back: freeing pinned memory asks the device, and after a device error that would end the process
    before the job is answered.
    """

    def __init__(self, inputs: PassInputs) -> None:
        self.inputs = inputs
        self.numbers = torch.empty_like(inputs.numbers, device="cpu", pin_memory=True)
        self.answer = torch.empty(MAX_SUFFIXES, MAX_OPTIONS, pin_memory=True)
