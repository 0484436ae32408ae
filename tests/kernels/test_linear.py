"""Linear layers, the LoRA branch beside them, and SwiGLU, against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import linear
from kernels.lora import Activation, AdaptedLinear, LowRank, lora_linear
from kernels.mlp import swiglu
from tests.kernels.oracles import DTYPES, assert_close, error, rand

INPUTS, OUTPUTS, RANK = 48, 40, 4


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "gelu":
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))
    if activation == "gelu_tanh":
        return x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", (1, 65))
def test_linear(rows: int, dtype: torch.dtype) -> None:
    x, weight = rand(rows, INPUTS, seed=1, dtype=dtype), rand(OUTPUTS, INPUTS, seed=2, dtype=dtype)
    bias = rand(OUTPUTS, seed=3, dtype=dtype)
    product = x.double() @ weight.double().T
    assert_close(linear(x, weight), product, dtype)
    assert_close(linear(x, weight, bias), product + bias.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ("none", "gelu", "gelu_tanh"))
@pytest.mark.parametrize("rows", (1, 65))
def test_lora_linear(rows: int, activation: Activation, dtype: torch.dtype) -> None:
    x, weight = rand(rows, INPUTS, seed=1, dtype=dtype), rand(OUTPUTS, INPUTS, seed=2, dtype=dtype) / INPUTS**0.5
    bias = rand(OUTPUTS, seed=3, dtype=dtype)
    lora = LowRank(rand(RANK, INPUTS, seed=4) / INPUTS**0.5, rand(OUTPUTS, RANK, seed=5), scale=1.5)
    branch = x.double() @ lora.down.double().T @ lora.up.double().T * lora.scale
    oracle = activated(x.double() @ weight.double().T + bias.double() + branch, activation)
    assert_close(lora_linear(x, AdaptedLinear.of(weight, bias, lora), activation), oracle, dtype)


def test_the_branch_is_not_rounded_before_it_is_added() -> None:
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    weight, bias = torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    # Just over half a step between the BF16 numbers above 1: rounded to BF16 it would be half a step, and the sum 1.
    lora = LowRank(torch.ones(1, 1), torch.full((1, 1), 2**-9 * (1 + 2**-10)), scale=2.0)
    assert float(lora_linear(x, AdaptedLinear.of(weight, bias, lora))) == 1 + 2**-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (1, 33))
def test_swiglu_reads_the_gate_first(width: int, dtype: torch.dtype) -> None:
    gate_up = rand(7, 2 * width, seed=1, dtype=dtype)
    gate, up = gate_up.double().split(width, dim=1)
    assert_close(swiglu(gate_up), gate * sigmoid(gate) * up, dtype)


def test_error_sees_what_is_not_finite() -> None:
    assert error(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) == float("inf")
