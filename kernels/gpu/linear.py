"""Plain linear layers on the GPU: cuBLAS, kept from splitting a sum where few rows would make it do so.

A split sum has other bits than a whole one. cuBLAS splits the long sums of this model's `down` projection when there
are few rows; measured on an H200 with cuBLAS 13.0, from `WHOLE_ROWS` rows on it never does, whatever the number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.layout import MAX_SUFFIXES

Tensor = torch.Tensor

LONG_SUM = 8192
WHOLE_ROWS = 320


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `kernels.linear.linear`. The rows that are read out are always `MAX_SUFFIXES`, and stay that few."""
    rows = x.shape[0]
    if weight.shape[1] >= LONG_SUM and MAX_SUFFIXES < rows < WHOLE_ROWS:
        return F.linear(_padded(x), weight, bias)[:rows]
    return F.linear(x, weight, bias)


def _padded(x: Tensor) -> Tensor:
    """`WHOLE_ROWS` rows, of which only the first mean anything: those that lie behind `x` already, if there are any."""
    there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.is_contiguous() and there >= WHOLE_ROWS * x.shape[1]:
        return x.as_strided((WHOLE_ROWS, x.shape[1]), x.stride())
    return F.pad(x, (0, 0, 0, WHOLE_ROWS - x.shape[0]))
