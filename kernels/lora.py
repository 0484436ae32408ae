"""Linear layers with a float32 low-rank branch beside their weight, and the activation that follows."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

# `gelu_tanh` is the tanh approximation, `gelu` the exact function of Hendrycks and Gimpel 2016 (arXiv 1606.08415).
Activation = Literal["none", "gelu", "gelu_tanh"]


class LowRank(NamedTuple):
    """A LoRA pair: `down` `[rank, in]` (A) and `up` `[out, rank]` (B), float32, and the factor of their product."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class AdaptedLinear(NamedTuple):
    """A layer: `weight` `[out, in]` and `bias` `[out]`, model dtype, and the branch beside them."""

    weight: torch.Tensor
    bias: torch.Tensor
    lora: LowRank

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor, lora: LowRank) -> AdaptedLinear:
        """The layer. On a GPU its weight is copied, to have the branch's `up` behind each of its rows."""
        assert lora.down.dtype == lora.up.dtype == torch.float32
        if weight.is_cuda:
            from kernels.gpu import lora as gpu

            weight = gpu.joined(weight, lora.up)
        return cls(weight, bias, lora)


def lora_linear(x: torch.Tensor, layer: AdaptedLinear, activation: Activation = "none") -> torch.Tensor:
    """`activation(x W^T + bias + scale * (x A^T) B^T)`, the low-rank branch unmerged and in float32.

    Args:
        x: `[N, in]`, model dtype.
        layer: of `AdaptedLinear.of`; TF32 must be off.

    Returns:
        `[N, out]`, model dtype. On a CPU, as PEFT 0.21 over a BF16 base: the base product with its bias is rounded to
        the model dtype; to it, in float32, the scaled branch is added; the sum is rounded; the activation is computed
        in float32 and rounded. On a GPU only the last of these roundings is made (for `gelu`, the last two).

    Source: Hu et al. 2021 (arXiv 2106.09685).
    """
    if x.is_cuda:
        from kernels.gpu import lora as gpu

        return gpu.lora_linear(x, layer, activation)
    weight, bias, lora = layer
    base = F.linear(x, weight, bias)
    branch = F.linear(F.linear(x.float(), lora.down), lora.up) * lora.scale
    return _activate((base + branch).to(x.dtype), activation)


def lora_mlp(x: torch.Tensor, first: AdaptedLinear, second: AdaptedLinear, activation: Activation) -> torch.Tensor:
    """`lora_linear(lora_linear(x, first, activation), second)`, without copying what lies between on a GPU.

    Args:
        x: `[N, in]`, model dtype.
        first, second, activation: as in `lora_linear`.

    Returns:
        `[N, out]`, model dtype, with the same roundings as the two layers.
    """
    if x.is_cuda:
        from kernels.gpu import lora as gpu

        return gpu.lora_mlp(x, first, second, activation)
    return lora_linear(lora_linear(x, first, activation), second)


def _activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "none":
        return x
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
