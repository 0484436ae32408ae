"""Undoing PNG filters against Pillow, whose decoder is the contract's."""

from __future__ import annotations

import io
import zlib

import pytest
import torch
from PIL import Image

from kernels.unfilter import unfilter
from tests import pngs


def pillow(data: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(data)) as picture:
        rgb = picture.convert("RGB")
    return torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8).view(rgb.height, rgb.width, 3)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("size", [*pngs.SIZES, (257, 383)])
def test_a_filter_a_row_by_chance_gives_pillows_pixels(size: tuple[int, int], channels: int) -> None:
    pixels, kinds = pngs.noise(*size, channels), pngs.mixed(size[0])
    found = unfilter(pngs.filter_rows(pixels, kinds), channels)
    assert found.dtype == torch.uint8 and torch.equal(found, pixels[:, :, :3])
    assert torch.equal(found, pillow(pngs.encode(pixels, kinds)))


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("kind", range(5))
def test_each_filter_on_every_row_gives_pillows_pixels(kind: int, channels: int) -> None:
    """Any bytes are some picture's filtered bytes, so noise meets every tie and every carry."""
    rows = torch.cat([torch.full((37, 1), kind, dtype=torch.uint8), pngs.noise(37, 29, channels).view(37, -1)], dim=1)
    head = (b"IHDR", pngs.header(29, 37, channels))
    data = pngs.file(head, *pngs.split(zlib.compress(rows.numpy().tobytes()), []), (b"IEND", b""))
    assert torch.equal(unfilter(rows, channels), pillow(data))


def test_few_values_make_paeths_ties() -> None:
    pixels = pngs.noise(60, 60, 3) % 3
    assert torch.equal(unfilter(pngs.filter_rows(pixels, [4] * 60), 3), pixels)
