"""The plain linear layers: products of a whole pass's rows with one weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias`.

    Args:
        x: `[T, in]`, model dtype.
        weight: `[out, in]`, model dtype; several layers that read the same rows are stacked into one.
        bias: `[out]`, model dtype, or None.

    Returns:
        `[T, out]`, model dtype: summed in float32 with the bias, rounded once.
    """
    if x.is_cuda:
        from kernels.gpu import linear as gpu

        return gpu.linear(x, weight, bias)
    return F.linear(x, weight, bias)
