"""Rotary embeddings against rotations of complex numbers in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.norms import rms_norm
from kernels.rotary import inverse_frequencies, mrope_table, split_norm_rotate, split_rotate_vision, vision_table
from tests.kernels.oracles import DTYPES, assert_close, error, rand

SECTIONS = (3, 3, 2)
HALF = sum(SECTIONS)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """`[T, H, d]` with the pairs `(i, i + half)` turned by `[T, half]` angles, in float64."""
    half = angles.shape[1]
    wide = x.double()
    turned = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat([turned.real, turned.imag, wide[..., 2 * half :]], dim=-1)


def test_inverse_frequencies() -> None:
    found = inverse_frequencies(8, 10_000.0)
    assert found.dtype == torch.float32
    assert error(found, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)) <= 1e-7


def test_the_vision_table_turns_with_row_and_column() -> None:
    rows, columns = torch.tensor([0, 3, 7]), torch.tensor([5, 0, 2])
    frequencies = inverse_frequencies(8, 10_000.0)
    cos, sin = vision_table(rows, columns, frequencies)
    angles = torch.cat(
        [torch.outer(rows.double(), frequencies.double()), torch.outer(columns.double(), frequencies.double())], 1
    )
    assert cos.dtype == sin.dtype == torch.float32
    assert error(cos, angles.cos()) <= 1e-6 and error(sin, angles.sin()) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_text_table_interleaves_the_axes(dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 9, 9, 20], [0, 10, 9, 20], [0, 9, 12, 20]])
    frequencies = inverse_frequencies(2 * HALF, 10_000.0)
    cos, sin = mrope_table(positions, frequencies, SECTIONS, dtype)
    axis = [0, 1, 2, 0, 1, 2, 0, 1]  # sections of 3, 3 and 2, dealt out in turn
    angles = positions[axis].double().T * frequencies.double()
    assert_close(cos, angles.cos(), dtype)
    assert_close(sin, angles.sin(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("patches", (1, 6, 65))
def test_the_vision_split_rotates_queries_and_keys(patches: int, dtype: torch.dtype) -> None:
    heads, width = 3, 16
    qkv = rand(patches, 3 * heads * width, seed=1, dtype=dtype)
    angles = rand(patches, width // 2, seed=2).double() * 3
    q, k, v = split_rotate_vision(qkv, (angles.cos().float(), angles.sin().float()), heads)
    parts = qkv.reshape(patches, 3, heads, width)
    assert_close(q, rotated(parts[:, 0], angles), dtype)
    assert_close(k, rotated(parts[:, 1], angles), dtype)
    assert torch.equal(v, parts[:, 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", (1, 6, 65))
def test_the_text_split_norms_then_rotates_a_part(tokens: int, dtype: torch.dtype) -> None:
    heads, kv_heads, width, eps = 4, 2, 24, 1e-6
    projected = rand(tokens, (2 * heads + 2 * kv_heads) * width, seed=1, dtype=dtype)
    q_weight, k_weight = rand(width, seed=2, dtype=dtype), rand(width, seed=3, dtype=dtype)
    angles = rand(tokens, HALF, seed=4).double() * 3
    table = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k, v, gate = split_norm_rotate(projected, q_weight, k_weight, table, heads, kv_heads, eps)
    columns = projected.reshape(tokens, -1, width)
    assert_close(q, rotated(rms_norm(columns[:, :4], q_weight, eps), angles), dtype)
    assert torch.equal(gate, columns[:, 4:8].flatten(1))
    assert_close(k, rotated(rms_norm(columns[:, 8:10], k_weight, eps), angles), dtype)
    assert torch.equal(v, columns[:, 10:])
