"""The language model: a packed pass over token rows, with states in and out.

The architecture is the language model of Qwen3.5: every layer mixes tokens, by the gated delta rule or by full
attention, then applies a SwiGLU MLP, each after a norm and added to the residual stream. Linear layers run over all
rows of a pass; only convolution, delta rule and attention know its segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.config import TextConfig
from engine.model.state import DeltaState, KeyValueState, LayerState, State
from kernels.attention import extended, gate_output, last_rows_attention, shared_prefix_attention
from kernels.causal_conv import conv_silu_split
from kernels.delta_rule import decay_and_strength, gated_delta_rule
from kernels.layout import last_rows
from kernels.linear import linear
from kernels.mlp import swiglu
from kernels.norms import add_rms_norm, gated_rms_norm, rms_norm
from kernels.rotary import Table, mrope_table, split_norm_rotate
from kernels.segments import Segments

Tensor = torch.Tensor


class Packing(NamedTuple):
    """What a pass's layers share: its segments and its rotary table."""

    segments: Segments
    table: Table


@dataclass(frozen=True)
class DeltaMixer:
    """A gated delta rule layer.

    `in_proj` `[C + V * value_dim + 2 * V, D]` stacks queries, keys and values (C, the convolution's channels), the
    output gate z, and b and a; `conv` is `[C, width]`; `a_log` and `dt_bias` `[V]`; `norm` `[value_dim]`; `out_proj`
    `[D, V * value_dim]`.
    """

    config: TextConfig
    in_proj: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor

    def __call__(self, normed: Tensor, packing: Packing, state: LayerState | None) -> tuple[Tensor, LayerState]:
        """Mix `[T, D]`; returns `[T, D]` and the layer's state at the prefix's end."""
        assert state is None or isinstance(state, DeltaState)
        config, segments = self.config, packing.segments
        heads = config.linear_num_value_heads
        parts = [config.linear_conv_size, config.linear_value_size, heads, heads]
        mixed, z, b, a = torch.split(linear(normed, self.in_proj), parts, dim=1)
        q, k, v, conv_end = conv_silu_split(
            mixed,
            self.conv,
            state.conv if state else None,
            segments,
            key_heads=config.linear_num_key_heads,
            value_heads=heads,
            key_dim=config.linear_key_head_dim,
        )
        g, beta = decay_and_strength(a, b, self.a_log, self.dt_bias)
        output, memory = gated_delta_rule(q, k, v, g, beta, state.memory if state else None, segments)
        gated = gated_rms_norm(output, z, self.norm, config.rms_norm_eps)
        return linear(gated, self.out_proj), DeltaState(conv_end, memory)

    def last(self, normed: Tensor, packing: Packing, state: LayerState | None) -> tuple[Tensor, LayerState]:
        """As a call, but return only the suffixes' last rows `[K, D]`; all rows are mixed to get there."""
        mixed, end = self(normed, packing, state)
        return last_rows(mixed, packing.segments), end


@dataclass(frozen=True)
class AttentionMixer:
    """A full attention layer.

    `in_proj` `[(2 * H + 2 * KV) * d, D]` stacks all heads' queries, then gates, keys and values; `q_norm` and `k_norm`
    are `[d]`; `out_proj` `[D, H * d]`.
    """

    config: TextConfig
    in_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out_proj: Tensor

    def __call__(self, normed: Tensor, packing: Packing, state: LayerState | None) -> tuple[Tensor, LayerState]:
        """Mix `[T, D]`; returns `[T, D]` and the layer's state at the prefix's end."""
        assert state is None or isinstance(state, KeyValueState)
        q, k, v, gate = self._project(normed, self.in_proj, packing.table)
        end = KeyValueState(*extended(state, k, v, packing.segments))
        attended = shared_prefix_attention(q, k, v, end, packing.segments)
        return linear(gate_output(attended, gate), self.out_proj), end

    def last(self, normed: Tensor, packing: Packing, state: LayerState | None) -> tuple[Tensor, LayerState]:
        """As a call, but mix only the suffixes' last rows: `[K, D]`. Of the other rows only keys and values matter."""
        assert state is None or isinstance(state, KeyValueState)
        segments = packing.segments
        asking, asked = torch.split(
            self.in_proj, [2 * self.config.attention_size, 2 * self.config.key_value_size], dim=0
        )
        _, k, v, _ = self._project(normed, asked, packing.table, heads=0)
        cos, sin = (last_rows(part, segments) for part in packing.table)
        q, _, _, gate = self._project(last_rows(normed, segments), asking, (cos, sin), kv_heads=0)
        end = KeyValueState(*extended(state, k, v, segments))
        attended = last_rows_attention(q, k, v, end, segments)
        return linear(gate_output(attended, gate), self.out_proj), end

    def _project(
        self, normed: Tensor, weight: Tensor, table: Table, heads: int | None = None, kv_heads: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and gate by the rows of `in_proj` that are given."""
        return split_norm_rotate(
            linear(normed, weight),
            self.q_norm,
            self.k_norm,
            table,
            heads=self.config.num_attention_heads if heads is None else heads,
            kv_heads=self.config.num_key_value_heads if kv_heads is None else kv_heads,
            eps=self.config.rms_norm_eps,
        )


@dataclass(frozen=True)
class Layer:
    """A layer: norms `[D]` before the mixer and before the MLP, whose `gate_up` is `[2 * F, D]` and `down` `[D, F]`."""

    input_norm: Tensor
    mixer: DeltaMixer | AttentionMixer
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LayerOutput(NamedTuple):
    """What a pass has after a layer.

    `hidden` is the residual stream `[T, D]`; `normed` the same rows under the next layer's norm, or the final norm
    after the last layer; `state` the layer's state at the prefix's end.
    """

    hidden: Tensor
    normed: Tensor
    state: LayerState


@dataclass(frozen=True)
class LanguageModel:
    """The whole model.

    `embedding` is `[vocab_size, D]`, tied to the read-out; `final_norm` `[D]`; `frequencies` the rotary embedding's,
    `[rotary_dims / 2]` float32.
    """

    config: TextConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    frequencies: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        """Rows `[T, D]`, model dtype, of token ids `[T]` int64. The image's rows are the caller's to put in."""
        return F.embedding(ids, self.embedding)

    def letter_rows(self, letter_ids: Sequence[int]) -> Tensor:
        """The read-out's rows `[L, D]`, model dtype, of some tokens."""
        return self.embedding[torch.tensor(letter_ids, device=self.embedding.device)]

    def prefill(
        self, hidden: Tensor, positions: Tensor, segments: Segments, state: State | None = None
    ) -> tuple[Tensor, State]:
        """One pass: the prefix continues from `state`, every suffix from the prefix's end.

        Args:
            hidden: `[T, D]`, model dtype: the prefix's rows, then each suffix's, as `segments` packs them.
            positions: `[3, T]`, int64: time, height and width of each row. A state's tokens are not in it.
            segments: T tokens; without suffixes only the state is of interest.
            state: where the prefix continues (or the suffixes, if the prefix is empty); None at a prompt's beginning.

        Returns:
            The rows of each suffix's last token after the final norm, `[K, D]`, model dtype, and the state at the
            prefix's end. Its tensors may be views of larger ones: `State.copy` what is to be kept.
        """
        packing = self._pack(hidden, positions, segments, state)
        *starts, last_start = state.layers if state else [None] * len(self.layers)
        *layers, last_layer = self.layers
        ends: list[LayerState] = []
        normed = rms_norm(hidden, self.layers[0].input_norm, self.config.rms_norm_eps)
        for step in self._run(layers, hidden, normed, packing, starts):
            hidden, normed = step.hidden, step.normed
            ends.append(step.state)
        # The last layer works only where it is read.
        mixed, end = last_layer.mixer.last(normed, packing, last_start)
        _, normed = self._mlp(last_layer, last_rows(hidden, segments), mixed, self.final_norm)
        return normed, State((state.tokens if state else 0) + segments.prefix_tokens, (*ends, end))

    def run(
        self, hidden: Tensor, positions: Tensor, segments: Segments, state: State | None = None
    ) -> Iterator[LayerOutput]:
        """A pass as `prefill` makes it, layer by layer, with all rows of the last layer too."""
        packing = self._pack(hidden, positions, segments, state)
        normed = rms_norm(hidden, self.layers[0].input_norm, self.config.rms_norm_eps)
        starts = state.layers if state else [None] * len(self.layers)
        return self._run(self.layers, hidden, normed, packing, starts)

    def _pack(self, hidden: Tensor, positions: Tensor, segments: Segments, state: State | None) -> Packing:
        assert hidden.shape == (segments.tokens, self.config.hidden_size), (hidden.shape, segments)
        assert positions.shape == (3, segments.tokens), (positions.shape, segments)
        assert state is None or len(state.layers) == len(self.layers), "a state of another model"
        return Packing(segments, mrope_table(positions, self.frequencies, self.config.mrope_section, hidden.dtype))

    def _run(
        self,
        layers: Sequence[Layer],
        hidden: Tensor,
        normed: Tensor,
        packing: Packing,
        starts: Sequence[LayerState | None],
    ) -> Iterator[LayerOutput]:
        """The first layers, which are given, over the residual stream and its rows under the first norm."""
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for layer, next_norm, start in zip(layers, next_norms, starts, strict=False):
            mixed, end = layer.mixer(normed, packing, start)
            hidden, normed = self._mlp(layer, hidden, mixed, next_norm)
            yield LayerOutput(hidden, normed, end)

    def _mlp(self, layer: Layer, hidden: Tensor, mixed: Tensor, next_norm: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's second half: the residual stream after it, and its rows under the next norm."""
        eps = self.config.rms_norm_eps
        hidden, normed = add_rms_norm(hidden, mixed, layer.post_norm, eps)
        wide = swiglu(linear(normed, layer.gate_up))
        return add_rms_norm(hidden, linear(wide, layer.down), next_norm, eps)
