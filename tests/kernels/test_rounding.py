"""The kernels round where Transformers and PEFT round: BF16 results equal theirs to the bit.

Where sums run in another order, all but one value in a hundred do.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from kernels.attention import gate_output
from kernels.causal_conv import causal_conv
from kernels.delta_rule import chunked
from kernels.lora import AdaptedLinear, LowRank, lora_linear
from kernels.mlp import swiglu
from kernels.norms import gated_rms_norm, l2_norm, rms_norm
from kernels.patches import interpolate_table, patch_places
from kernels.rotary import split_norm_rotate, split_rotate_vision
from kernels.segments import Segments
from tests.kernels.oracles import DTYPES, error, rand

EPS = 1e-6


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    norm = reference.Qwen3_5RMSNorm(48, EPS).to(dtype)
    norm.weight.copy_(rand(48, seed=1))
    x = rand(33, 48, seed=2, dtype=dtype)
    assert torch.equal(rms_norm(x, norm.weight, EPS), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm(dtype: torch.dtype) -> None:
    norm = reference.Qwen3_5RMSNormGated(16, EPS).to(dtype)
    norm.weight.copy_(rand(16, seed=1))
    x, gate = rand(33, 3, 16, seed=2, dtype=dtype), rand(33, 48, seed=3, dtype=dtype)
    expected = norm(x.reshape(-1, 16), gate.reshape(-1, 16)).reshape(33, 48)
    assert torch.equal(gated_rms_norm(x, gate, norm.weight, EPS), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vision_rotation(dtype: torch.dtype) -> None:
    qkv, angles = rand(33, 3 * 2 * 16, seed=1, dtype=dtype), rand(33, 8, seed=2)
    cos, sin = angles.cos(), angles.sin()
    q, k, _ = qkv.view(33, 3, 2, 16).unbind(1)
    expected = reference.apply_rotary_pos_emb_vision(q, k, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
    found = split_rotate_vision(qkv, (cos, sin), heads=2)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_text_rotation(dtype: torch.dtype) -> None:
    q_norm, k_norm = (reference.Qwen3_5RMSNorm(24, EPS).to(dtype) for _ in range(2))
    q_norm.weight.copy_(rand(24, seed=1))
    k_norm.weight.copy_(rand(24, seed=2))
    projected, angles = rand(33, (2 * 4 + 2 * 2) * 24, seed=3, dtype=dtype), rand(33, 4, seed=4)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k, _, _ = split_norm_rotate(projected, q_norm.weight, k_norm.weight, (cos, sin), 4, 2, EPS)
    columns = projected.view(1, 33, 12, 24)
    expected_q, expected_k = reference.apply_rotary_pos_emb(
        q_norm(columns[:, :, :4]).transpose(1, 2),
        k_norm(columns[:, :, 8:10]).transpose(1, 2),
        torch.cat([cos, cos], -1)[None],
        torch.cat([sin, sin], -1)[None],
    )
    assert torch.equal(q, expected_q[0].transpose(0, 1)) and torch.equal(k, expected_k[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_and_output_gate(dtype: torch.dtype) -> None:
    gate_up = rand(33, 2 * 24, seed=1, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=1)
    assert torch.equal(swiglu(gate_up), nn.functional.silu(gate) * up)
    assert torch.equal(gate_output(up, gate), up * torch.sigmoid(gate))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", ((2, 228), (16, 16), (50, 80)))
def test_learned_positions(grid: tuple[int, int], dtype: torch.dtype) -> None:
    table, grid_thw = rand(48 * 48, 16, seed=1, dtype=dtype), torch.tensor([[1, *grid]])
    places, weights = get_vision_interpolation_indices_and_weights(grid_thw, 48, "bilinear", True, 2)
    rows, columns = patch_places(*grid, 2, torch.device("cpu"))
    assert torch.equal(torch.stack([rows, columns], 1), get_vision_position_ids(grid_thw, 2))
    expected = (table[places] * weights[:, :, None]).sum(1).to(dtype)
    assert torch.equal(interpolate_table(table, rows, columns, *grid), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution(dtype: torch.dtype) -> None:
    x, weight = rand(65, 24, seed=1, dtype=dtype), rand(24, 4, seed=2, dtype=dtype)
    expected = reference.causal_conv1d_fn(x.T[None], weight)[0].T
    found, _ = causal_conv(x, weight, None, Segments(65, ()))
    # Four products are summed in another order: a BF16 result may fall to the other side, one step (2^-8) apart.
    assert error(found, expected) <= {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    assert float((found != expected).float().mean()) <= {torch.float32: 1.0, torch.bfloat16: 0.01}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_rule(dtype: torch.dtype) -> None:
    tokens, heads, group, width = 129, 2, 3, 16
    q, k = (rand(tokens, heads, width, seed=seed, dtype=dtype) for seed in (1, 2))
    v = rand(tokens, heads * group, width, seed=3, dtype=dtype)
    g = -rand(tokens, heads * group, seed=4).abs()
    beta = torch.sigmoid(rand(tokens, heads * group, seed=5, dtype=dtype))
    state = rand(heads * group, width, width, seed=6)
    expected, expected_end = reference.torch_chunk_gated_delta_rule(
        *(x[None] for x in (q.repeat_interleave(group, 1), k.repeat_interleave(group, 1), v, g, beta)),
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found, end = chunked(l2_norm(q), l2_norm(k), v, g, beta, state)
    assert error(found, expected[0]) <= {torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
    assert float((found != expected[0]).float().mean()) <= {torch.float32: 1.0, torch.bfloat16: 0.01}[dtype]
    assert error(end, expected_end[0]) <= 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_lora_is_pefts(dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Linear(48, 40)).to(dtype)
    adapted = get_peft_model(layer, LoraConfig(r=4, lora_alpha=8, target_modules=["0"], init_lora_weights=False))
    module = adapted.base_model.model[0]
    down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
    assert down.dtype == up.dtype == torch.float32
    x = rand(33, 48, seed=1, dtype=dtype)
    found = lora_linear(x, AdaptedLinear.of(module.base_layer.weight, module.base_layer.bias, LowRank(down, up, 2.0)))
    assert torch.equal(found, adapted(x))
