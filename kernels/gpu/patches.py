"""Pixels to patches on the GPU: `uint8` in, normalised patches in the model dtype out, in one pass."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.patches import PIXEL_CENTRE

Tensor = torch.Tensor


def pack_patches(pixels: Tensor, patch: int, frames: int, merge: int, dtype: torch.dtype) -> Tensor:
    """See `kernels.patches.pack_patches`."""
    height, width, channels = pixels.shape
    assert pixels.is_contiguous()
    rows, columns = height // patch, width // patch
    values = channels * frames * patch * patch
    out = torch.empty(rows * columns, values, dtype=dtype, device=pixels.device)
    _pack[(rows * columns,)](
        pixels, out, columns, values, PIXEL_CENTRE, channels, frames, patch, merge, BLOCK=triton.next_power_of_2(values)
    )
    return out


@triton.jit
def _pack(
    pixels,
    out,
    columns,
    values,
    centre,
    CHANNELS: tl.constexpr,
    FRAMES: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    # Merge order: blocks of MERGE x MERGE patches, row by row, and each block row by row.
    block, place = number // (MERGE * MERGE), number % (MERGE * MERGE)
    row = block // (columns // MERGE) * MERGE + place // MERGE
    column = block % (columns // MERGE) * MERGE + place % MERGE
    index = tl.arange(0, BLOCK)
    inside = index < values
    x = index % PATCH
    y = index // PATCH % PATCH
    channel = index // (PATCH * PATCH * FRAMES)
    pixel = ((row * PATCH + y) * (columns * PATCH) + column * PATCH + x) * CHANNELS + channel
    byte = tl.load(pixels + pixel, mask=inside, other=0).to(tl.float32)
    # A correctly rounded division: the reference's bits.
    value = tl.math.div_rn(byte - centre, centre)
    tl.store(out + number.to(tl.int64) * values + index, value.to(out.dtype.element_ty), mask=inside)
