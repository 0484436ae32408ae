"""Patch packing against the golden vectors, merge order and learned positions against their definitions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from engine.image import decode, resize
from kernels.patches import interpolate_table, pack_patches, patch_places
from tests.kernels.oracles import DTYPES, assert_close, rand

VECTORS = Path(__file__).parents[1] / "vectors"
ACCEPTED = {name: case for name, case in json.loads((VECTORS / "images.json").read_text()).items() if case["accept"]}
GRIDS = ((2, 2), (2, 228), (14, 6), (50, 80), (64, 64))


@pytest.mark.parametrize("name", ACCEPTED)
def test_golden_pixel_values(name: str) -> None:
    values = pack_patches(resize(decode((VECTORS / "images" / name).read_bytes())))
    _, rows, columns = ACCEPTED[name]["grid"]
    assert values.shape == (rows * columns, 1536) and values.dtype == torch.float32
    assert hashlib.sha256(values.numpy().astype("<f4").tobytes()).hexdigest() == ACCEPTED[name]["pixel_values_sha256"]


def test_packing_in_bf16_rounds_the_float32_values() -> None:
    pixels = torch.arange(64 * 32 * 3).remainder(256).to(torch.uint8).view(64, 32, 3)
    assert torch.equal(pack_patches(pixels, dtype=torch.bfloat16), pack_patches(pixels).to(torch.bfloat16))


def test_every_pixel_is_where_its_patch_is() -> None:
    patch, frames, merge = 4, 3, 2
    pixels = torch.randint(0, 256, (16, 24, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    values = pack_patches(pixels, patch, frames, merge).view(-1, 3, frames, patch, patch)
    rows, columns = patch_places(4, 6, merge, torch.device("cpu"))
    for packed, row, column in zip(values, rows, columns, strict=True):
        square = pixels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        expected = (square.permute(2, 0, 1).float() - 127.5) / 127.5
        assert torch.equal(packed, expected.unsqueeze(1).expand(-1, frames, -1, -1))


def test_places_run_through_merge_blocks() -> None:
    rows, columns = patch_places(4, 4, 2, torch.device("cpu"))
    assert rows.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert columns.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", (8, 48))
@pytest.mark.parametrize("grid", GRIDS)
def test_learned_positions_are_stretched_corner_on_corner(grid: tuple[int, int], side: int, dtype: torch.dtype) -> None:
    table = rand(side * side, 5, seed=1, dtype=dtype)
    rows, columns = patch_places(*grid, 2, torch.device("cpu"))
    found = interpolate_table(table, rows, columns, *grid)
    square = table.double().T.reshape(1, 5, side, side)
    stretched = torch.nn.functional.interpolate(square, size=grid, mode="bilinear", align_corners=True)
    # Float32 places on the axis are exact to about side * 2^-24, which is what the weights lose.
    oracle = stretched[0, :, rows, columns].T
    if dtype == torch.float32:
        assert float((found.double() - oracle).abs().max()) <= 4 * side * 2**-24 * float(table.abs().max())
    else:
        assert_close(found, oracle, dtype)
