"""Attention on the GPU: over all patches by cuDNN, and over a shared prefix by a streaming softmax of our own.

Ours walks the keys of the shared tokens in blocks from the first on, then a suffix's own keys in blocks from its
first: one order, whatever else is in the pass and wherever the shared keys came from, hence one result to the bit.
Streaming softmax: Milakov and Gimelshein 2018 (arXiv 1805.02867), Dao et al. 2022 (arXiv 2205.14135).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.layout import TILE_TOKENS, Layout

Tensor = torch.Tensor

KEYS = 64
# Queries of a tile when only the rows that are read out ask: one is there, sixteen are the least a product takes.
READ_TILE_TOKENS = 16


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See `kernels.attention.full_attention`. No other backend is tried: another would give other bits."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    backend = SDPBackend.CUDNN_ATTENTION if q.dtype == torch.bfloat16 else SDPBackend.EFFICIENT_ATTENTION
    with sdpa_kernel(backend):
        attended = F.scaled_dot_product_attention(query, key, value)
    return attended.squeeze(0).transpose(0, 1).flatten(1)


def extend(shared: tuple[Tensor, Tensor], k: Tensor, v: Tensor, layout: Layout) -> None:
    """Write the prefix's keys and values behind the past ones.

    Args:
        shared: keys and values `[capacity, KV, d]`, model dtype, whose first rows are the past's.
        k, v: `[T, KV, d]`, model dtype; rows may be slices of wider ones.
        layout: the pass.
    """
    tokens, heads, width = k.shape
    assert all(x.is_contiguous() for x in shared) and k[0].is_contiguous() and v[0].is_contiguous()
    block = triton.next_power_of_2(heads * width)
    _extend[(tokens, 2)](
        k, v, *shared, layout.counts, k.stride(0), v.stride(0), shared[0].shape[0], heads * width, BLOCK=block
    )


@triton.jit
def _extend(k, v, keys, values, counts, k_stride, v_stride, capacity, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    past = tl.load(counts)
    if (row < tl.load(counts + 1)) & (past + row < capacity):
        column = tl.arange(0, BLOCK)
        inside = column < width
        if tl.program_id(1) == 0:
            tl.store(
                keys + (past + row) * width + column, tl.load(k + row * k_stride + column, mask=inside), mask=inside
            )
        else:
            value = tl.load(v + row * v_stride + column, mask=inside)
            tl.store(values + (past + row) * width + column, value, mask=inside)


def shared_prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, shared: tuple[Tensor, Tensor], layout: Layout, read_only: bool
) -> Tensor:
    """See `kernels.attention.shared_prefix_attention`.

    Args:
        q: `[T, H, d]`, or, with `read_only`, `[MAX_SUFFIXES, H, d]` of the rows that are read out.
        k, v: `[T, KV, d]`.
        shared: as `extend` left them.
        layout: the pass; rows of padding are left unwritten.
        read_only: whether only the rows that are read out ask.
    """
    heads, width = q.shape[1:]
    kv_heads = k.shape[1]
    tiles = layout.read_tiles if read_only else layout.tiles
    assert q.is_contiguous() and k[0].is_contiguous() and v[0].is_contiguous()
    assert width == triton.next_power_of_2(width) and heads % kv_heads == 0
    out = torch.empty(q.shape[0], heads * width, dtype=q.dtype, device=q.device)
    _attend[(tiles.shape[0], heads)](
        q,
        k,
        v,
        *shared,
        out,
        tiles,
        layout.counts,
        k.stride(0),
        v.stride(0),
        width**-0.5 / math.log(2.0),
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=width,
        QUERIES=READ_TILE_TOKENS if read_only else TILE_TOKENS,
        KEYS=KEYS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4 if read_only else 8,
        num_stages=2,
    )
    return out


@triton.jit
def _step(query, key, value, visible, scale, top, weight, total, PRECISION: tl.constexpr):
    """Take one block of keys into the running maximum, sum of weights and weighted values."""
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, axis=1))
    share = tl.exp2(score - higher[:, None])
    fade = tl.exp2(top - higher)
    weight = weight * fade + tl.sum(share, axis=1)
    total = tl.dot(share.to(value.dtype), value, total * fade[:, None], input_precision=PRECISION)
    return higher, weight, total


@triton.jit
def _attend(
    q,
    k,
    v,
    shared_keys,
    shared_values,
    out,
    tiles,
    counts,
    k_stride,
    v_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tiles + 4 * tl.program_id(0)
    begin, end = tl.load(tile), tl.load(tile + 1)
    if begin < end:
        offset, own = tl.load(tile + 2), tl.load(tile + 3)
        past = tl.load(counts)
        shared = past + tl.load(counts + 1)
        head = tl.program_id(1)
        kv_head = head // GROUP
        d = tl.arange(0, D)[None, :]
        place = begin + tl.arange(0, QUERIES)
        row = place + offset
        asked = (place < end)[:, None]
        query_at = place.to(tl.int64)[:, None] * HEADS * D + head * D + d
        query = tl.load(q + query_at, mask=asked, other=0.0)
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        weight = tl.zeros([QUERIES], tl.float32)
        total = tl.zeros([QUERIES, D], tl.float32)
        # A suffix sees all shared keys, the prefix's rows those up to their own.
        in_prefix = own < 0
        last = tl.where(in_prefix, past + row, shared - 1)[:, None]
        for first in range(0, tl.where(in_prefix, past + end + offset, shared), KEYS):
            index = first + tl.arange(0, KEYS)
            there = (index < shared)[:, None]
            at = index.to(tl.int64)[:, None] * (HEADS // GROUP * D) + kv_head * D + d
            key = tl.load(shared_keys + at, mask=there, other=0.0)
            value = tl.load(shared_values + at, mask=there, other=0.0)
            top, weight, total = _step(query, key, value, index[None, :] <= last, scale, top, weight, total, PRECISION)
        for first in range(tl.where(in_prefix, end + offset, own), end + offset, KEYS):
            index = first + tl.arange(0, KEYS)
            there = (index < end + offset)[:, None]
            at = index.to(tl.int64)[:, None]
            key = tl.load(k + at * k_stride + kv_head * D + d, mask=there, other=0.0)
            value = tl.load(v + at * v_stride + kv_head * D + d, mask=there, other=0.0)
            top, weight, total = _step(
                query, key, value, index[None, :] <= row[:, None], scale, top, weight, total, PRECISION
            )
        tl.store(out + query_at, (total / weight[:, None]).to(out.dtype.element_ty), mask=asked)
