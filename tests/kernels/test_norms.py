"""The norms against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.norms import add_layer_norm, add_rms_norm, gated_rms_norm, l2_norm, layer_norm, rms_norm
from tests.kernels.oracles import DTYPES, assert_close, error, rand

EPS = 1e-6
WIDTHS = (1, 33, 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_zero_centred(width: int, dtype: torch.dtype) -> None:
    x, weight = rand(7, width, seed=1, dtype=dtype), rand(width, seed=2, dtype=dtype)
    wide = x.double()
    oracle = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (1 + weight.double())
    assert_close(rms_norm(x, weight, EPS), oracle, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_holds_eps_against_zeros(dtype: torch.dtype) -> None:
    assert torch.equal(
        rms_norm(torch.zeros(3, 8, dtype=dtype), rand(8, seed=1, dtype=dtype), EPS).float(), torch.zeros(3, 8)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_gated_rms_norm_weighs_then_gates(width: int, dtype: torch.dtype) -> None:
    x, weight = rand(5, 3, width, seed=1, dtype=dtype), rand(width, seed=2, dtype=dtype)
    # The gate comes as a slice of wider rows.
    gate = rand(5, 3 * width + 4, seed=3, dtype=dtype)[:, 2 : 2 + 3 * width]
    wide, gates = x.double(), gate.double().reshape(5, 3, width)
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    oracle = (normed * weight.double() * gates / (1 + (-gates).exp())).reshape(5, 3 * width)
    assert_close(gated_rms_norm(x, gate, weight, EPS), oracle, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (2, 33, 128))
def test_layer_norm_has_weight_and_bias(width: int, dtype: torch.dtype) -> None:
    x = rand(7, width, seed=1, dtype=dtype)
    weight, bias = rand(width, seed=2, dtype=dtype), rand(width, seed=3, dtype=dtype)
    wide = x.double()
    scaled = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, correction=0, keepdim=True) + EPS).sqrt()
    assert_close(layer_norm(x, weight, bias, EPS), scaled * weight.double() + bias.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_additions_round_the_sum_before_the_norm(dtype: torch.dtype) -> None:
    residual, delta = rand(9, 40, seed=1, dtype=dtype), rand(9, 40, seed=2, dtype=dtype)
    weight, bias = rand(40, seed=3, dtype=dtype), rand(40, seed=4, dtype=dtype)
    total = residual + delta
    for found, normed in (
        (add_rms_norm(residual, delta, weight, EPS), rms_norm(total, weight, EPS)),
        (add_layer_norm(residual, delta, weight, bias, EPS), layer_norm(total, weight, bias, EPS)),
    ):
        assert torch.equal(found[0], total)
        assert torch.equal(found[1], normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2_norm_gives_unit_vectors_in_float32(dtype: torch.dtype) -> None:
    x = rand(5, 3, 16, seed=1, dtype=dtype)
    found = l2_norm(x)
    assert found.dtype == torch.float32
    assert error(found, x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()) <= 1e-6
    assert torch.equal(l2_norm(torch.zeros(2, 4)), torch.zeros(2, 4))
