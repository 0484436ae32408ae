"""Rotary position embeddings: the angle tables, and the fused splits of a projection that apply them.

A table holds `[T, half]` cosines and sines for the pairs `(x[i], x[i + half])` of a head's rotated part (Su et al.
2021, arXiv 2104.09864, in the half-split form of GPT-NeoX).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.norms import rms_norm

Tensor = torch.Tensor
Table = tuple[Tensor, Tensor]


def inverse_frequencies(dims: int, theta: float) -> Tensor:
    """`theta ** (-2 i / dims)` for `i < dims / 2`: `[dims / 2]`, float32, on the CPU, where its bits are fixed."""
    return 1.0 / (theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims))


def vision_table(rows: Tensor, columns: Tensor, frequencies: Tensor) -> Table:
    """The angles of patches on their grid: the first half of the pairs turns with the row, the second with the column.

    Args:
        rows, columns: `[N]`, int64.
        frequencies: `[d / 4]`, float32, of `inverse_frequencies(d / 2, theta)` for heads of width d.

    Returns:
        Cosines and sines, each `[N, d / 2]`, float32.
    """
    angles = torch.cat([rows[:, None].float() * frequencies, columns[:, None].float() * frequencies], dim=1)
    return angles.cos(), angles.sin()


def mrope_table(positions: Tensor, frequencies: Tensor, sections: Sequence[int], dtype: torch.dtype) -> Table:
    """The angles of tokens by time, height and width, the three axes interleaved over the frequencies.

    Args:
        positions: `[3, T]`, int64: time, height, width.
        frequencies: `[half]`, float32, of `inverse_frequencies(rotary_dims, theta)`.
        sections: how many frequencies turn with each axis, summing to `half`. Frequency `i` belongs to height where
            `i % 3 == 1` and to width where `i % 3 == 2`, as long as `i` is under three times that axis's section;
            otherwise to time.
        dtype: the model dtype.

    Returns:
        Cosines and sines, each `[T, half]`, computed in float32 and rounded to the model dtype.

    Source: the interleaved multimodal rotary embedding of Qwen3-VL (arXiv 2511.21631).
    """
    angles = positions[0, :, None].float() * frequencies
    for axis in (1, 2):
        mine = slice(axis, 3 * sections[axis], 3)
        angles[:, mine] = positions[axis, :, None].float() * frequencies[mine]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def split_rotate_vision(qkv: Tensor, table: Table, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the vision encoder's fused projection, queries and keys rotated.

    Args:
        qkv: `[N, 3 * H * d]`, model dtype.
        table: of `vision_table`, float32.
        heads: H.

    Returns:
        Three of `[N, H, d]`, model dtype; the rotation is computed in float32 and rounded once.
    """
    if qkv.is_cuda:
        from kernels.gpu import rotary as gpu

        return gpu.split_rotate_vision(qkv, table, heads)
    q, k, v = qkv.reshape(qkv.shape[0], 3, heads, -1).unbind(1)
    return _rotate(q.float(), table).to(q.dtype), _rotate(k.float(), table).to(k.dtype), v


def split_norm_rotate(
    projected: Tensor, q_weight: Tensor, k_weight: Tensor, table: Table, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and gate of full attention's fused projection; queries and keys normalised and rotated.

    Args:
        projected: `[T, (2 * H + 2 * KV) * d]`, model dtype; its columns are queries, gate, keys, values.
        q_weight, k_weight: `[d]`, model dtype, of a `1 + weight` norm over each head.
        table: of `mrope_table`, model dtype; the dims of a head past `2 * half` are not rotated.
        heads: H, of the queries and the gate; 0 if there are none.
        kv_heads: KV; 0 if there are no keys and values.

    Returns:
        queries `[T, H, d]`, keys `[T, KV, d]`, values `[T, KV, d]`, gate `[T, H * d]`, all model dtype. Rounded after
        the norm, after each product with the table and after their sum.
    """
    if projected.is_cuda:
        from kernels.gpu import rotary as gpu

        return gpu.split_norm_rotate(projected, q_weight, k_weight, table, heads, kv_heads, eps)
    tokens, columns = projected.shape
    width = columns // (2 * heads + 2 * kv_heads)
    q, gate, k, v = torch.split(projected, [heads * width, heads * width, kv_heads * width, kv_heads * width], dim=1)
    q = rms_norm(q.reshape(tokens, heads, width), q_weight, eps)
    k = rms_norm(k.reshape(tokens, kv_heads, width), k_weight, eps)
    return _rotate(q, table), _rotate(k, table), v.reshape(tokens, kv_heads, width), gate


def _rotate(x: Tensor, table: Table) -> Tensor:
    """`[T, H, d]` with its first `2 * half` dims turned; the arithmetic is that of x's dtype."""
    cos, sin = (part[:, None, :] for part in table)
    half = cos.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
