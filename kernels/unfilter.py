"""Undoing a PNG's filters: from the bytes its zlib stream holds to the picture's, to the bit."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

# The filter types of the PNG specification (W3C, section 9.2); a row's is its first byte.
NONE, SUB, UP, AVERAGE, PAETH = range(5)


def unfilter(filtered: Tensor, channels: int) -> Tensor:
    """The picture behind a PNG's filtered scanlines.

    Args:
        filtered: `uint8 [H, 1 + W * channels]`: each row's filter type, 0 to 4, then its filtered bytes.
        channels: bytes a pixel: 3 for RGB, 4 for RGBA.

    Returns:
        `uint8 [H, W, 3]`; alpha is dropped.

    Source: PNG specification (third edition, W3C 2025), section 9, "Filtering". A byte is what was filtered plus a
    prediction from the bytes of the same channel to the left, above and above left, modulo 256; what lies outside of
    the picture is 0.
    """
    height, stride = filtered.shape
    width = (stride - 1) // channels
    assert filtered.dtype == torch.uint8 and channels in (3, 4) and stride == 1 + width * channels > 1
    if filtered.is_cuda:
        from kernels.gpu import unfilter as gpu

        return gpu.unfilter(filtered, channels)
    kinds = filtered[:, :1].int()
    deltas = filtered[:, 1:].view(height, width, channels)[:, :, :3].int()
    # With a row of zeros above and a column of zeros to the left.
    out = torch.zeros(height + 1, width + 1, 3, dtype=torch.int32)
    # Along a diagonal every pixel's neighbours are known: they lie on the two before.
    for diagonal in range(height + width - 1):
        rows = torch.arange(max(0, diagonal - width + 1), min(height, diagonal + 1))
        columns = diagonal - rows
        left, above, corner = out[rows + 1, columns], out[rows, columns + 1], out[rows, columns]
        predicted = _prediction(kinds[rows], left, above, corner)
        out[rows + 1, columns + 1] = (deltas[rows, columns] + predicted) % 256
    return out[1:, 1:].to(torch.uint8)


def _prediction(kinds: Tensor, left: Tensor, above: Tensor, corner: Tensor) -> Tensor:
    """What the filter types, `[N, 1]`, add to the pixels whose neighbours are given, each int32 `[N, 3]`."""
    zero = torch.zeros_like(left)
    guess = left + above - corner
    to_left, to_above, to_corner = ((guess - byte).abs() for byte in (left, above, corner))
    paeth = torch.where(
        (to_left <= to_above) & (to_left <= to_corner), left, torch.where(to_above <= to_corner, above, corner)
    )
    predicted = torch.where(kinds == SUB, left, zero)
    predicted = torch.where(kinds == UP, above, predicted)
    predicted = torch.where(kinds == AVERAGE, (left + above) // 2, predicted)
    return torch.where(kinds == PAETH, paeth, predicted)
