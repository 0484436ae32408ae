"""Fused splits of a projection on the GPU: vision's 2-D rotary, and full attention's norms with interleaved mRoPE."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor


def split_rotate_vision(qkv: Tensor, table: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.rotary.split_rotate_vision`. The values are a view of `qkv`."""
    patches, columns = qkv.shape
    half = columns // (6 * heads)
    cos, sin = table
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and cos.shape == (patches, half)
    rotated = torch.empty(patches, 2, heads, 2 * half, dtype=qkv.dtype, device=qkv.device)
    tiles = {"HEADS": triton.next_power_of_2(2 * heads), "HALF": triton.next_power_of_2(half)}
    _rotate_vision[(patches,)](qkv, cos, sin, rotated, 2 * heads, half, **tiles, num_warps=4)
    return rotated[:, 0], rotated[:, 1], qkv.view(patches, 3, heads, 2 * half)[:, 2]


@triton.jit
def _rotate_vision(qkv, cos, sin, out, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    # Queries and keys lie side by side, so that they are one row of 2 H heads.
    patch = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    place = head * 2 * half + pair
    row = qkv + patch * heads * 3 * half
    first = tl.load(row + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + place + half, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + patch * half + pair, mask=pair < half, other=0.0)
    s = tl.load(sin + patch * half + pair, mask=pair < half, other=0.0)
    target = out + patch * heads * 2 * half + place
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def split_norm_rotate(
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    table: tuple[Tensor, Tensor],
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.rotary.split_norm_rotate`. The values and the gate are views of `projected`."""
    tokens, columns = projected.shape
    width = columns // (2 * heads + 2 * kv_heads)
    assert projected.is_contiguous() and all(part.is_contiguous() for part in table)
    q = torch.empty(tokens, heads, width, dtype=projected.dtype, device=projected.device)
    k = torch.empty(tokens, kv_heads, width, dtype=projected.dtype, device=projected.device)
    _, gate, keys, values = torch.split(projected, [heads * width] * 2 + [kv_heads * width] * 2, dim=1)
    for source, weight, out, count in ((projected, q_weight, q, heads), (keys, k_weight, k, kv_heads)):
        if count:
            _norm_rotate_launch(source, weight, table, out, columns, count, width, eps)
    return q, k, values.view(tokens, kv_heads, width), gate


def _norm_rotate_launch(
    source: Tensor,
    weight: Tensor,
    table: tuple[Tensor, Tensor],
    out: Tensor,
    row_stride: int,
    heads: int,
    width: int,
    eps: float,
) -> None:
    half = table[0].shape[1]
    tiles = {
        "HEADS": triton.next_power_of_2(heads),
        "HALF": triton.next_power_of_2(half),
        "BLOCK": triton.next_power_of_2(width),
    }
    # Without fused multiply-adds, which would leave out the rounding between a product and a sum.
    options = {"num_warps": 4, "enable_fp_fusion": False}
    _norm_rotate[(out.shape[0],)](source, weight, *table, out, row_stride, heads, width, half, eps, **tiles, **options)


@triton.jit
def _normed(x, scale, gain):
    """A norm's output, rounded to the model dtype and widened again."""
    return (x.to(tl.float32) * scale * (1.0 + gain.to(tl.float32))).to(x.dtype).to(tl.float32)


@triton.jit
def _norm_rotate(
    source,
    weight,
    cos,
    sin,
    out,
    row_stride,
    heads,
    width,
    half,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    source += token * row_stride
    out += token * heads * width
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (column < width)
    x = tl.load(source + head * width + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)[:, None]
    gain = tl.load(weight + column, mask=column < width, other=0.0)
    rest = inside & (column >= 2 * half)
    tl.store(out + head * width + column, _normed(x, scale, gain).to(dtype), mask=rest)

    pair = tl.arange(0, HALF)[None, :]
    turned = (head < heads) & (pair < half)
    low, high = head * width + pair, head * width + half + pair
    first = tl.load(source + low, mask=turned, other=0.0)
    second = tl.load(source + high, mask=turned, other=0.0)
    first = _normed(first, scale, tl.load(weight + pair, mask=pair < half, other=0.0))
    second = _normed(second, scale, tl.load(weight + half + pair, mask=pair < half, other=0.0))
    c = tl.load(cos + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0).to(tl.float32)
    # Every product is rounded before their sum, as operators of the model dtype would.
    low_value = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    high_value = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)
    tl.store(out + low, low_value.to(dtype), mask=turned)
    tl.store(out + high, high_value.to(dtype), mask=turned)
