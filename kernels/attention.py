"""Softmax attention: over all patches, and over a shared prefix continued by several suffixes.

Softmax is float32, scores are scaled by `1 / sqrt(d)` (Vaswani et al. 2017, arXiv 1706.03762).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.segments import Segments

Tensor = torch.Tensor


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every patch attends to every patch.

    Args:
        q, k, v: `[N, H, d]`, model dtype.

    Returns:
        `[N, H * d]`, model dtype.
    """
    return _attend(q, k, v, mask=None)


def shared_prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None, segments: Segments
) -> Tensor:
    """Causal attention with grouped heads: a suffix sees the past, the prefix and itself, but no other suffix.

    Args:
        q: `[T, H, d]`, model dtype, packed as `segments` says.
        k, v: `[T, KV, d]`, model dtype; H is a multiple of KV, and key head `j` serves the query heads `j * H / KV` up
            to the next (Ainslie et al. 2023, arXiv 2305.13245).
        past: keys and values before the prefix, each `[P, KV, d]`, model dtype; None for none.

    Returns:
        `[T, H * d]`, model dtype.
    """
    assert q.shape[0] == k.shape[0] == segments.tokens
    keys, values = continued(past, (k[segments.prefix], v[segments.prefix]))
    outputs = [_attend_causal(q[segments.prefix], keys, values)] if segments.prefix_tokens else []
    for rows in segments.suffixes:
        own = continued((keys, values), (k[rows], v[rows]))
        outputs.append(_attend_causal(q[rows], *own))
    return torch.cat(outputs)


def continued(past: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
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
