"""Normalisations, alone and fused with the residual addition that comes before them.

All statistics are float32. Where a result is rounded to the model dtype is said at each function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

# The constant beside the sum of squares in the delta rule's query and key normalisation.
L2_NORM_EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm with a zero-centred weight: `x / sqrt(mean(x^2) + eps) * (1 + weight)`.

    Args:
        x: `[..., D]`, model dtype.
        weight: `[D]`, model dtype.

    Returns:
        `[..., D]`, model dtype: everything in float32, rounded once.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467); `1 + weight` as in Gemma and Qwen3-Next.
    """
    if x.is_cuda:
        from kernels.gpu import norms as gpu

        return gpu.rms_norm(x, weight, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (1.0 + weight.float())).to(x.dtype)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after an addition, and its `rms_norm`.

    Args:
        residual, delta: `[T, D]`, model dtype.
        weight: `[D]`, model dtype.

    Returns:
        The sum `[T, D]`, rounded to the model dtype, and the norm of the rounded sum `[T, D]`.
    """
    if residual.is_cuda:
        from kernels.gpu import norms as gpu

        return gpu.add_rms_norm(residual, delta, weight, eps)
    total = residual + delta
    return total, rms_norm(total, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over a head, times its plain weight, times `silu(gate)`.

    Args:
        x: `[T, V, d]`, model dtype: what the delta rule gives.
        gate: `[T, V * d]`, model dtype; may be a slice of wider rows.
        weight: `[d]`, model dtype.

    Returns:
        `[T, V * d]`, model dtype. Rounded after the norm and after the weight; the gate is applied in float32 and
        rounded once more.

    Source: the gated norm of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), norm before gate.
    """
    if x.is_cuda:
        from kernels.gpu import norms as gpu

        return gpu.gated_rms_norm(x, gate, weight, eps)
    tokens, heads, width = x.shape
    wide = x.float()
    scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    gates = F.silu(gate.reshape(tokens, heads, width).float())
    return ((weight * scaled) * gates).to(x.dtype).reshape(tokens, heads * width)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm (Ba et al. 2016, arXiv 1607.06450) with weight and bias.

    Args:
        x: `[N, D]`, model dtype.
        weight, bias: `[D]`, model dtype.

    Returns:
        `[N, D]`, model dtype: everything in float32, rounded once.
    """
    if x.is_cuda:
        from kernels.gpu import norms as gpu

        return gpu.layer_norm(x, weight, bias, eps)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(residual: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after an addition, and its `layer_norm`.

    Args:
        residual, delta: `[N, D]`, model dtype.
        weight, bias: `[D]`, model dtype.

    Returns:
        The sum `[N, D]`, rounded to the model dtype, and the norm of the rounded sum `[N, D]`.
    """
    if residual.is_cuda:
        from kernels.gpu import norms as gpu

        return gpu.add_layer_norm(residual, delta, weight, bias, eps)
    total = residual + delta
    return total, layer_norm(total, weight, bias, eps)


def l2_norm(x: Tensor, eps: float = L2_NORM_EPS) -> Tensor:
    """Vectors of length one: `x / sqrt(sum(x^2) + eps)`.

    Args:
        x: `[..., d]`, any float dtype.

    Returns:
        `[..., d]`, float32, not rounded to the model dtype.
    """
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)
