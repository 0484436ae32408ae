"""Resizing a picture to the encoder's multiples, to the bit: the bytes of a picture have one right answer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def resize_bicubic(pixels: Tensor, height: int, width: int) -> Tensor:
    """A picture in another size: bicubic with antialiasing, in integers.

    Args:
        pixels: `uint8 [H, W, 3]`.
        height, width: the new size.

    Returns:
        `uint8 [height, width, 3]`; the picture itself if it has that size already.

    Source: `torch.nn.functional.interpolate(mode="bicubic", antialias=True)` over `uint8` on the CPU, which is this
    function there: first along rows, then along columns, each rounded to bytes.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    if pixels.is_cuda:
        from kernels.gpu import resize as gpu

        return gpu.resize_bicubic(pixels, height, width)
    planes = pixels.permute(2, 0, 1)[None]
    resized = F.interpolate(planes, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
    return resized[0].permute(1, 2, 0).contiguous()
