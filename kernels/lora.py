"""A linear layer with a float32 low-rank branch beside its weight, and the activation that follows."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from kernels.norms import add_layer_norm

# `gelu_tanh` is the tanh approximation, `gelu` the exact function of Hendrycks and Gimpel 2016 (arXiv 1606.08415).
Activation = Literal["none", "gelu", "gelu_tanh"]


class LowRank(NamedTuple):
    """A LoRA pair: `down` `[rank, in]` (A) and `up` `[out, rank]` (B), float32, and the factor of their product."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


def lora_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, lora: LowRank, activation: Activation = "none"
) -> torch.Tensor:
    """`activation(x W^T + bias + scale * (x A^T) B^T)`, the low-rank branch unmerged and in float32.

    Args:
        x: `[N, in]`, model dtype.
        weight: `[out, in]`, model dtype.
        bias: `[out]`, model dtype.
        lora: float32 whatever the model dtype; TF32 must be off.

    Returns:
        `[N, out]`, model dtype. The base product with its bias is rounded to the model dtype; to it, in float32, the
        scaled branch is added; the sum is rounded; the activation is computed in float32 and rounded.

    Source: Hu et al. 2021 (arXiv 2106.09685); the roundings are those of PEFT 0.21 over a BF16 base.
    """
    assert lora.down.dtype == lora.up.dtype == torch.float32
    if x.is_cuda:
        from kernels.gpu import lora as gpu

        return gpu.lora_linear(x, weight, bias, *lora, activation)
    base = F.linear(x, weight, bias)
    branch = F.linear(F.linear(x.float(), lora.down), lora.up) * lora.scale
    return _activate((base + branch).to(x.dtype), activation)


def lora_add_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lora: LowRank,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_layer_norm(residual, lora_linear(x, weight, bias, lora), norm_weight, norm_bias, eps)`, in one go on a GPU.

    Args:
        x, weight, bias, lora: as in `lora_linear`, without an activation.
        residual: `[N, out]`, model dtype.
        norm_weight, norm_bias, eps: as in `add_layer_norm`.

    Returns:
        As `add_layer_norm`, with the same roundings as the two functions.
    """
    if x.is_cuda:
        from kernels.gpu import lora as gpu

        return gpu.lora_add_layer_norm(x, weight, bias, *lora, residual, norm_weight, norm_bias, eps)
    return add_layer_norm(residual, lora_linear(x, weight, bias, lora), norm_weight, norm_bias, eps)


def _activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "none":
        return x
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
