"""The causal convolution on the GPU, fused with what follows: SiLU and the split into heads."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.layout import Layout

Tensor = torch.Tensor

TOKENS = 16


def conv_silu_split(
    x: Tensor, weight: Tensor, state: Tensor, layout: Layout, key_heads: int, value_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.causal_conv.conv_silu_split`. Rows of padding are convolved too, and mean nothing."""
    tokens = x.shape[0]
    channels, width = weight.shape
    value_dim = (channels - 2 * key_heads * key_dim) // value_heads
    assert x.stride(1) == 1 and weight.is_contiguous() and state.is_contiguous() and layout.rows == tokens
    assert state.shape == (width - 1, channels)
    q = torch.empty(tokens, key_heads, key_dim, dtype=x.dtype, device=x.device)
    k = torch.empty_like(q)
    v = torch.empty(tokens, value_heads, value_dim, dtype=x.dtype, device=x.device)
    end = torch.empty_like(state)
    grid = (triton.cdiv(tokens, TOKENS) + 1, 2 * key_heads + value_heads)
    tiles = {"TOKENS": TOKENS, "BLOCK": triton.next_power_of_2(max(key_dim, value_dim)), "WIDTH": width}
    _conv[grid](
        x,
        weight,
        state,
        layout.row_start,
        layout.counts,
        q,
        k,
        v,
        end,
        tokens,
        x.stride(0),
        channels,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        **tiles,
        num_warps=4,
    )
    return q, k, v, end


@triton.jit
def _input(x, state, place, channel, inside, x_stride, channels, WIDTH: tl.constexpr):
    """Inputs at places of the prefix or the suffixes; a negative place is one of the state's rows."""
    past = place < 0
    pointer = tl.where(
        past,
        state + (place + WIDTH - 1).to(tl.int64) * channels + channel,
        x + place.to(tl.int64) * x_stride + channel,
    )
    return tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def _conv(
    x,
    weight,
    state,
    row_start,
    counts,
    q,
    k,
    v,
    end,
    tokens,
    x_stride,
    channels,
    key_heads,
    value_heads,
    key_dim,
    value_dim,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head = tl.program_id(1)
    is_value = head >= 2 * key_heads
    dims = tl.where(is_value, value_dim, key_dim)
    first = tl.where(is_value, 2 * key_heads * key_dim + (head - 2 * key_heads) * value_dim, head * key_dim)
    dim = tl.arange(0, BLOCK)[None, :]
    channel = first + dim
    inside = dim < dims
    prefix = tl.load(counts + 1)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        # The last programs write the state at the prefix's end: what a token after it would look back at.
        for back in tl.static_range(1, WIDTH):
            at_end = tl.full([1, 1], prefix - back, tl.int32)
            last = _input(x, state, at_end, channel, inside, x_stride, channels, WIDTH)
            tl.store(end + (WIDTH - 1 - back) * channels + channel, last, mask=inside)
    else:
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
        present = token < tokens
        start = tl.load(row_start + token, mask=present, other=0)
        # Before a suffix's first row stands the prefix's end; before the prefix's, the state.
        before = tl.where(start >= prefix, prefix, 0)
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(WIDTH):
            row = token - (WIDTH - 1 - tap)
            place = tl.where(row >= start, row, row - start + before)
            value = _input(x, state, place, channel, present & inside, x_stride, channels, WIDTH)
            gain = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0)
            total += value.to(tl.float32) * gain.to(tl.float32)
        rounded = total.to(v.dtype.element_ty).to(tl.float32)
        active = (rounded / (1.0 + tl.exp(-rounded))).to(v.dtype.element_ty)
        stored = present & inside
        row64 = token.to(tl.int64)
        if is_value:
            column = (head - 2 * key_heads) * value_dim + dim
            tl.store(v + row64 * value_heads * value_dim + column, active, mask=stored)
        else:
            target = q if head < key_heads else k
            column = tl.where(head < key_heads, head, head - key_heads) * key_dim + dim
            tl.store(target + row64 * key_heads * key_dim + column, active, mask=stored)
