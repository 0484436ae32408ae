"""The CPU's integer bicubic resize on the GPU, bit for bit: one kernel along the rows, one along the columns.

Each output pixel is a sum of input bytes times 16-bit weights, rounded by a shift. The weights are few and are computed
on the CPU in float64, as PyTorch does (`aten/src/ATen/native/cpu/UpSampleKernel.cpp`, after Pillow's resampling).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

# Of the cubic kernel with antialiasing: its sharpness and its reach on each side, in pixels of the coarser picture.
CUBIC_A = -0.5
CUBIC_REACH = 2.0
WEIGHT_BITS = 15
MAX_SHIFT = 22
BLOCK = 256


class Taps(NamedTuple):
    """How an axis is resampled: `first` `[out]`, the first input of each output, and `weights` `[out, taps]`, int32.

    An output is the weighted sum of its inputs, shifted right by `shift` bits.
    """

    first: Tensor
    weights: Tensor
    shift: int


def resize_bicubic(pixels: Tensor, height: int, width: int) -> Tensor:
    """See `kernels.resize.resize_bicubic`."""
    assert pixels.dtype == torch.uint8 and pixels.is_contiguous()
    rows, columns, channels = pixels.shape
    out = pixels
    if columns != width:
        out = _along(out, taps(columns, width, pixels.device), rows, columns, width, channels)
    if rows != height:
        out = _along(out, taps(rows, height, pixels.device), 1, rows, height, width * channels)
    return out.view(height, width, channels)


@lru_cache(maxsize=256)
def taps(size: int, new_size: int, device: torch.device) -> Taps:
    """The taps of an axis of `size` that becomes `new_size`."""
    scale = size / new_size
    reach = CUBIC_REACH * max(scale, 1.0)
    most = 2 * math.ceil(reach) + 1
    centre = scale * (torch.arange(new_size, dtype=torch.float64) + 0.5)
    first = (centre - reach + 0.5).long().clamp(min=0)
    count = ((centre + reach + 0.5).long().clamp(max=size) - first).clamp(0, most)
    tap = torch.arange(most)
    distance = ((tap + first[:, None]) - centre[:, None] + 0.5) / max(scale, 1.0)
    weights = torch.where(tap < count[:, None], _cubic(distance.abs()), 0.0)
    weights = weights / weights.sum(dim=1, keepdim=True)
    largest = float(weights.max())
    shift = 0
    while shift < MAX_SHIFT and int(0.5 + largest * (1 << (shift + 1))) < 1 << WEIGHT_BITS:
        shift += 1
    whole = weights * (1 << shift)
    rounded = torch.where(whole < 0, whole - 0.5, whole + 0.5).to(torch.int32)
    return Taps(first.int().to(device), rounded.to(device), shift)


def _cubic(x: Tensor) -> Tensor:
    """Keys' cubic convolution kernel over distances that are not negative."""
    near = ((CUBIC_A + 2.0) * x - (CUBIC_A + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * CUBIC_A
    return torch.where(x < 1.0, near, torch.where(x < 2.0, far, 0.0))


def _along(pixels: Tensor, axis: Taps, lines: int, size: int, new_size: int, stride: int) -> Tensor:
    """Resample `[lines, size, stride]` along its middle axis."""
    out = torch.empty(lines * new_size * stride, dtype=torch.uint8, device=pixels.device)
    _resample[(triton.cdiv(out.numel(), BLOCK),)](
        *(pixels, axis.first, axis.weights, out, out.numel(), size, new_size, stride),
        *(axis.weights.shape[1], axis.shift),
        BLOCK=BLOCK,
    )
    return out


# Not specialised: pictures come in all sizes, and none shall wait for a compiler.
@triton.jit(do_not_specialize=["count", "size", "new_size", "stride", "taps", "shift"])
def _resample(
    pixels,
    first,
    weights,
    out,
    count,
    size,
    new_size,
    stride,
    taps,
    shift,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    within = at % stride
    target = at // stride % new_size
    line = at // stride // new_size
    begin = tl.load(first + target, mask=inside, other=0)
    source = (line * size + begin) * stride + within
    total = tl.zeros([BLOCK], tl.int32) + (1 << (shift - 1))
    for tap in range(taps):
        weight = tl.load(weights + target * taps + tap, mask=inside, other=0)
        # A tap of weight 0 may lie beyond the last pixel.
        there = inside & (begin + tap < size)
        total += weight * tl.load(pixels + source + tap * stride, mask=there, other=0).to(tl.int32)
    tl.store(out + at, tl.minimum(tl.maximum(total >> shift, 0), 255).to(tl.uint8), mask=inside)
