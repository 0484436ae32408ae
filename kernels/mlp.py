"""The element-wise middle of the language model's MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of one fused product.

    Args:
        gate_up: `[T, 2 * F]`, model dtype: the gate's columns, then up's.

    Returns:
        `[T, F]`, model dtype: rounded after `silu` and after the product.

    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    if gate_up.is_cuda:
        from kernels.gpu import mlp as gpu

        return gpu.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
