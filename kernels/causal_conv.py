"""The short causal convolution before the delta rule, and what is fused behind it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.layout import layout_of
from kernels.segments import Segments

Tensor = torch.Tensor


def causal_conv(x: Tensor, weight: Tensor, state: Tensor | None, segments: Segments) -> tuple[Tensor, Tensor]:
    """A convolution along the tokens, each channel for itself, each token seeing itself and the `width - 1` before it.

    Args:
        x: `[T, C]`, model dtype, packed as `segments` says; may be a slice of wider rows.
        weight: `[C, width]`, model dtype; the last column meets the token itself.
        state: `[width - 1, C]`, model dtype: the inputs before the prefix, oldest first; None for zeros.
        segments: every suffix continues from the prefix's end.

    Returns:
        `[T, C]`, model dtype, summed in float32 and rounded once; and the state at the prefix's end
        `[width - 1, C]`, model dtype.
    """
    channels, width = weight.shape
    assert x.shape == (segments.tokens, channels)
    if state is None:
        state = x.new_zeros(width - 1, channels)
    assert state.shape == (width - 1, channels) and state.dtype == x.dtype
    prefix = torch.cat([state, x[segments.prefix]])
    end = prefix[segments.prefix_tokens :].clone()
    rows = [prefix, *(torch.cat([end, x[suffix]]) for suffix in segments.suffixes)]
    return torch.cat([_convolve(part, weight) for part in rows]), end


def conv_silu_split(
    x: Tensor, weight: Tensor, state: Tensor | None, segments: Segments, key_heads: int, value_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The delta rule's inputs: `causal_conv`, SiLU, the split into heads.

    Args:
        x: `[T, C]`, model dtype; its columns are queries `K * key_dim`, keys `K * key_dim`, values `V * value_dim`.
        weight, state, segments: as in `causal_conv`.
        key_heads: K.
        value_heads: V.
        key_dim: the width of a query or key head.

    Returns:
        queries and keys `[T, K, key_dim]`, values `[T, V, value_dim]`, all model dtype, and the convolution's state at
        the prefix's end. The convolution is rounded to the model dtype before SiLU and after it.
    """
    if x.is_cuda:
        from kernels.gpu import causal_conv as gpu

        assert state is not None, "on a GPU a pass continues from a state, be it of zeros"
        return gpu.conv_silu_split(x, weight, state, layout_of(segments), key_heads, value_heads, key_dim)
    mixed, end = causal_conv(x, weight, state, segments)
    mixed = F.silu(mixed)
    keys_width = key_heads * key_dim
    queries, keys, values = torch.split(mixed, [keys_width, keys_width, mixed.shape[1] - 2 * keys_width], dim=1)
    tokens = mixed.shape[0]
    return (
        queries.reshape(tokens, key_heads, key_dim),
        keys.reshape(tokens, key_heads, key_dim),
        values.reshape(tokens, value_heads, -1),
        end,
    )


def _convolve(rows: Tensor, weight: Tensor) -> Tensor:
    """The outputs `[tokens, C]` of `rows` `[width - 1 + tokens, C]`, whose first rows are only looked back at."""
    width = weight.shape[1]
    tokens = rows.shape[0] - (width - 1)
    wide, taps = rows.float(), weight.float()
    total = wide[:tokens] * taps[:, 0]
    for tap in range(1, width):
        total = total + wide[tap : tap + tokens] * taps[:, tap]
    return total.to(rows.dtype)
