"""A request between the CPU's part and the model's: picture, tokens, positions, and how they are packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.image import Picture
from kernels.segments import Segments


@dataclass(frozen=True)
class Prepared:
    """A request ready for the model, on the CPU.

    `image_key` is the SHA-256 of the image file. `picture` is what `engine.image.pixels_of` turns into pixels, `grid`
    `(1, rows, columns)` in patches once resized. `ids` `[T]` int64 packs the shared prefix and then each question's
    suffix, as `segments` says: the prefix is the constant head, of `head_tokens`, and the image. `positions` is
    `[3, T]` int64. `image_tokens` `[T]` int64 says which of the image's tokens stands in a row, -1 for text. `options`
    counts each question's letters. `input_tokens` sums every question's whole prompt. `prepare_ms` is what the CPU's
    part took.
    """

    image_key: bytes
    picture: Picture
    grid: tuple[int, int, int]
    ids: torch.Tensor
    positions: torch.Tensor
    image_tokens: torch.Tensor
    segments: Segments
    options: tuple[int, ...]
    head_tokens: int
    input_tokens: int
    prepare_ms: float
