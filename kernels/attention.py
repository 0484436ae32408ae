"""Softmax attention: over all patches, and over a shared prefix continued by several suffixes.

Softmax is float32, scores are scaled by `1 / sqrt(d)` (Vaswani et al. 2017, arXiv 1706.03762).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.layout import layout_of
from kernels.segments import Segments

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every patch attends to every patch.

    Args:
        q, k, v: `[N, H, d]`, model dtype.

    Returns:
        `[N, H * d]`, model dtype.
    """
    if q.is_cuda:
        from kernels.gpu import attention as gpu

        return gpu.full_attention(q, k, v)
    return _attend(q, k, v, mask=None)


def extended(past: Pair | None, k: Tensor, v: Tensor, segments: Segments) -> Pair:
    """The keys and values that every suffix shares: those of the past and of the prefix.

    Args:
        past: keys and values before the prefix, each `[P, KV, d]`, model dtype; None for none. On a GPU they must have
            room for the prefix behind the past's rows, and it is written there.
        k, v: `[T, KV, d]`, model dtype, packed as `segments` says.

    Returns:
        `[P + prefix, KV, d]` each; on a GPU `past` itself, with its room.
    """
    if k.is_cuda:
        from kernels.gpu import attention as gpu

        assert past is not None, "on a GPU a pass continues from a state, be it of no tokens"
        gpu.extend(past, k, v, layout_of(segments))
        return past
    return continued(past, (k[segments.prefix], v[segments.prefix]))


def shared_prefix_attention(q: Tensor, k: Tensor, v: Tensor, shared: Pair, segments: Segments) -> Tensor:
    """Causal attention with grouped heads: a suffix sees what is shared and itself, but no other suffix.

    Args:
        q: `[T, H, d]`, model dtype, packed as `segments` says.
        k, v: `[T, KV, d]`, model dtype; H is a multiple of KV, and key head `j` serves the query heads `j * H / KV` up
            to the next (Ainslie et al. 2023, arXiv 2305.13245).
        shared: of `extended`.

    Returns:
        `[T, H * d]`, model dtype.
    """
    assert q.shape[0] == k.shape[0] == segments.tokens
    if q.is_cuda:
        from kernels.gpu import attention as gpu

        return gpu.shared_prefix_attention(q, k, v, shared, layout_of(segments), read_only=False)
    outputs = [_attend_causal(q[segments.prefix], *shared)] if segments.prefix_tokens else []
    outputs += [_attend_causal(q[rows], *continued(shared, (k[rows], v[rows]))) for rows in segments.suffixes]
    return torch.cat(outputs)


def last_rows_attention(q: Tensor, k: Tensor, v: Tensor, shared: Pair, segments: Segments) -> Tensor:
    """As `shared_prefix_attention`, for queries of the suffixes' last rows only.

    Args:
        q: `[K, H, d]`, of the rows of `layout.last_rows`.
        k, v, shared: as in `shared_prefix_attention`.

    Returns:
        `[K, H * d]`, model dtype.
    """
    if q.is_cuda:
        from kernels.gpu import attention as gpu

        return gpu.shared_prefix_attention(q, k, v, shared, layout_of(segments), read_only=True)
    outputs = [
        _attend_causal(q[place : place + 1], *continued(shared, (k[rows], v[rows])))
        for place, rows in enumerate(segments.suffixes)
    ]
    return torch.cat(outputs) if outputs else q.flatten(1)


def continued(past: Pair | None, new: Pair) -> Pair:
    """Keys and values `[P + T, KV, d]` of the past, if any, and the new ones."""
    if past is None:
        return new
    return torch.cat([past[0], new[0]]), torch.cat([past[1], new[1]])


def gate_output(attended: Tensor, gate: Tensor) -> Tensor:
    """`attended * sigmoid(gate)`: full attention's output gate.

    Args:
        attended: `[T, H * d]`, model dtype.
        gate: `[T, H * d]`, model dtype; may be a slice of wider rows.

    Returns:
        `[T, H * d]`, model dtype: the sigmoid is rounded, then the product.
    """
    if attended.is_cuda:
        from kernels.gpu import mlp as gpu

        return gpu.gate_output(attended, gate)
    return attended * torch.sigmoid(gate)


def _attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The queries are the last of the keys' tokens; each sees the keys up to its own."""
    if q.shape[0] == k.shape[0]:
        return _attend(q, k, v, mask=None, causal=True)
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).tril(k.shape[0] - q.shape[0])
    return _attend(q, k, v, mask)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return attended.squeeze(0).transpose(0, 1).flatten(1)
