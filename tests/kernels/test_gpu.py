"""The GPU kernels' logic, run by Triton's interpreter on the CPU: float32, odd sizes, outputs that start as NaN.

Their roundings to BF16 and their speed can only be seen on a GPU: `benchmarks.kernels` checks both there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these tests")

from kernels import attention, causal_conv, delta_rule, lora, mlp, norms, patches, resize, rotary, unfilter
from kernels.gpu import attention as gpu_attention
from kernels.gpu import causal_conv as gpu_conv
from kernels.gpu import delta_rule as gpu_delta
from kernels.gpu import lora as gpu_lora
from kernels.gpu import mlp as gpu_mlp
from kernels.gpu import norms as gpu_norms
from kernels.gpu import patches as gpu_patches
from kernels.gpu import resize as gpu_resize
from kernels.gpu import rotary as gpu_rotary
from kernels.gpu import unfilter as gpu_unfilter
from kernels.layout import Layout
from kernels.segments import Segments
from tests import pngs
from tests.kernels.oracles import rand

Tensor = torch.Tensor

# Of float32 against float32: a few roundings of values of order one, or of a chunk's worth of sums.
TOLERANCE = 2e-5
EPS = 1e-6
PADDING = 3
PACKINGS = (Segments(70, (5, 64, 66)), Segments(2, (3,)), Segments(0, (7, 2)), Segments(64, ()))
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 32
HEADS, KV_HEADS, WIDTH = 4, 2, 16
PAST = 5


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every `torch.empty` of a launcher is NaN, so that what a kernel does not write shows."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def poisoned(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 85)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poisoned(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poisoned(empty_like(*args, **kwargs)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: poisoned(new_empty(*args, **kwargs)))
    with torch.inference_mode():
        yield


def assert_same(found: Tensor, oracle: Tensor) -> None:
    assert found.shape == oracle.shape and found.dtype == oracle.dtype
    torch.testing.assert_close(found, oracle, rtol=TOLERANCE, atol=TOLERANCE)


def assert_all_same(found: tuple[Tensor, ...], oracle: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, oracle, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("rows, width", [(1, 16), (5, 40)])
def test_norms(rows: int, width: int) -> None:
    x, delta = rand(rows, width, seed=1), rand(rows, width, seed=2)
    weight, bias = rand(width, seed=3), rand(width, seed=4)
    assert_same(gpu_norms.rms_norm(x, weight, EPS), norms.rms_norm(x, weight, EPS))
    assert_all_same(gpu_norms.add_rms_norm(x, delta, weight, EPS), norms.add_rms_norm(x, delta, weight, EPS))
    assert_same(gpu_norms.layer_norm(x, weight, bias, EPS), norms.layer_norm(x, weight, bias, EPS))
    assert_all_same(
        gpu_norms.add_layer_norm(x, delta, weight, bias, EPS), norms.add_layer_norm(x, delta, weight, bias, EPS)
    )


def test_gated_norm_and_gates() -> None:
    x, wide, weight = rand(5, 3, 20, seed=1), rand(5, 100, seed=2), rand(20, seed=3)
    gate = wide[:, 3:63]
    assert_same(gpu_norms.gated_rms_norm(x, gate, weight, EPS), norms.gated_rms_norm(x, gate, weight, EPS))
    assert_same(gpu_mlp.swiglu(wide), mlp.swiglu(wide))
    attended = rand(5, 60, seed=4)
    assert_same(gpu_mlp.gate_output(attended, gate), attention.gate_output(attended, gate))


@pytest.mark.parametrize("height, width", [(32, 32), (64, 96)])
def test_patches_to_the_bit(height: int, width: int) -> None:
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(gpu_patches.pack_patches(pixels, 16, 2, 2, torch.float32), patches.pack_patches(pixels))


@pytest.mark.parametrize("size, resized", [((1, 1), (32, 32)), ((33, 47), (32, 64)), ((75, 32), (64, 32))])
def test_resize_to_the_bit(size: tuple[int, int], resized: tuple[int, int]) -> None:
    pixels = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    assert torch.equal(gpu_resize.resize_bicubic(pixels, *resized), resize.resize_bicubic(pixels, *resized))


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("size", pngs.SIZES)
def test_unfilter_to_the_bit(size: tuple[int, int], channels: int) -> None:
    filtered = pngs.filter_rows(pngs.noise(*size, channels), pngs.mixed(size[0]))
    assert torch.equal(gpu_unfilter.unfilter(filtered, channels), unfilter.unfilter(filtered, channels))


@pytest.mark.parametrize("kind", range(5))
def test_unfilter_across_bands_to_the_bit(kind: int) -> None:
    """Any bytes are some picture's filtered bytes; 70 rows are three bands, 21 columns fewer than a band's steps."""
    filtered = torch.cat([torch.full((70, 1), kind, dtype=torch.uint8), pngs.noise(70, 21, 3).view(70, -1)], dim=1)
    assert torch.equal(gpu_unfilter.unfilter(filtered, 3), unfilter.unfilter(filtered, 3))


def test_vision_rotary() -> None:
    qkv, table = rand(7, 3 * 3 * 8, seed=1), (rand(7, 4, seed=2), rand(7, 4, seed=3))
    assert_all_same(gpu_rotary.split_rotate_vision(qkv, table, 3), rotary.split_rotate_vision(qkv, table, 3))


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (0, 2), (4, 0)])
def test_norm_and_rotary(heads: int, kv_heads: int) -> None:
    projected = rand(7, (2 * heads + 2 * kv_heads) * WIDTH, seed=1)
    table, weights = (rand(7, 3, seed=2), rand(7, 3, seed=3)), (rand(WIDTH, seed=4), rand(WIDTH, seed=5))
    arguments = (projected, *weights, table, heads, kv_heads, EPS)
    assert_all_same(gpu_rotary.split_norm_rotate(*arguments), rotary.split_norm_rotate(*arguments))


@pytest.mark.parametrize("many_rows", [1, 64])
@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh"])
def test_lora(activation: lora.Activation, many_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lora, "MANY_ROWS", many_rows)  # the tiles of many rows, and those of few
    x, first, second = rand(37, 48, seed=1), adapted(48, 520, seed=2), adapted(520, 40, seed=6)
    on_gpu = [layer._replace(weight=gpu_lora.joined(layer.weight, layer.lora.up)) for layer in (first, second)]
    assert_same(gpu_lora.lora_linear(x, on_gpu[0], activation), lora.lora_linear(x, first, activation))
    assert_same(gpu_lora.lora_mlp(x, *on_gpu, activation), lora.lora_mlp(x, first, second, activation))


def test_the_branch_in_three_parts_keeps_float32s_digits() -> None:
    up = rand(30, 12, seed=1)
    joined = gpu_lora.joined(torch.zeros(30, 8, dtype=torch.bfloat16), up)
    behind = (
        joined.as_strided((30, joined.stride(0)), joined.stride())[:, 8:].double().view(30, len(gpu_lora.PAIRS), 12)
    )
    parts = {second: behind[:, place] for place, (_, second) in enumerate(gpu_lora.PAIRS)}
    assert torch.equal(sum(parts.values()), up.double())


def adapted(inputs: int, outputs: int, seed: int) -> lora.AdaptedLinear:
    """A layer whose rank is no power of two."""
    pair = lora.LowRank(rand(12, inputs, seed=seed) / inputs**0.5, rand(outputs, 12, seed=seed + 1) / 7, 2.0)
    weight = rand(outputs, inputs, seed=seed + 2) / inputs**0.5
    return lora.AdaptedLinear.of(weight, rand(outputs, seed=seed + 3), pair)


@pytest.mark.parametrize("segments", PACKINGS)
def test_convolution_and_delta_rule(segments: Segments) -> None:
    tokens, rows = segments.tokens, segments.tokens + PADDING
    layout = Layout.build(segments, PAST, rows)
    channels = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    wide, weight, state = rand(rows, channels + 5, seed=1), rand(channels, 4, seed=2), rand(3, channels, seed=3)
    x, sizes = wide[:, 2 : 2 + channels], (KEY_HEADS, VALUE_HEADS, KEY_DIM)
    *found, end = gpu_conv.conv_silu_split(x, weight, state, layout, *sizes)
    *oracle, oracle_end = causal_conv.conv_silu_split(x[:tokens], weight, state, segments, *sizes)
    assert_all_same(tuple(part[:tokens] for part in found), tuple(oracle))
    assert torch.equal(end, oracle_end)

    gates = rand(rows, 2 * VALUE_HEADS, seed=4) * 3
    scalars = (gates[:, :VALUE_HEADS], gates[:, VALUE_HEADS:], rand(VALUE_HEADS, seed=5), rand(VALUE_HEADS, seed=6))
    g, beta = gpu_delta.decay_and_strength(*scalars)
    assert_all_same((g, beta), delta_rule.decay_and_strength(*scalars))

    q, k, v = found
    memory = rand(VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=7)
    expected, expected_end = delta_rule.gated_delta_rule(*oracle, g[:tokens], beta[:tokens], memory, segments)
    output = gpu_delta.gated_delta_rule(q, k, v, g, beta, memory, layout, segments.prefix_tokens > 0)
    assert_same(output[:tokens], expected)
    assert_same(memory, expected_end)


def test_equal_keys_that_fade_slowly_are_solved() -> None:
    """Flat regions of a screen repeat one key; a power of the chunk's system would grow past float32's digits."""
    segments = Segments(64, (64,))
    layout = Layout.build(segments, 0)
    k = torch.ones(128, KEY_HEADS, KEY_DIM)
    v = rand(128, VALUE_HEADS, VALUE_DIM, seed=1)
    g, beta = torch.full((128, VALUE_HEADS), -1e-4), torch.full((128, VALUE_HEADS), 0.99)
    memory = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM)
    expected, _ = delta_rule.gated_delta_rule(k, k, v, g, beta, memory.clone(), segments)
    assert_same(gpu_delta.gated_delta_rule(k, k, v, g, beta, memory, layout, True), expected)


@pytest.mark.parametrize("segments", PACKINGS)
def test_attention_over_a_shared_prefix(segments: Segments) -> None:
    tokens, rows = segments.tokens, segments.tokens + PADDING
    layout = Layout.build(segments, PAST, rows)
    q, k = rand(rows, HEADS, WIDTH, seed=1), rand(rows, KV_HEADS, WIDTH, seed=2)
    v = rand(rows, KV_HEADS * WIDTH + 3, seed=3)[:, 1 : 1 + KV_HEADS * WIDTH].view(rows, KV_HEADS, WIDTH)
    past = (rand(PAST, KV_HEADS, WIDTH, seed=4), rand(PAST, KV_HEADS, WIDTH, seed=5))
    room = PAST + segments.prefix_tokens + 2
    shared = tuple(torch.full((room, KV_HEADS, WIDTH), float("nan")).index_copy(0, torch.arange(PAST), x) for x in past)
    gpu_attention.extend((shared[0], shared[1]), k, v, layout)
    expected_shared = attention.extended(past, k[:tokens], v[:tokens], segments)
    for found, oracle in zip(shared, expected_shared, strict=True):
        assert torch.equal(found[: room - 2], oracle) and bool(found[room - 2 :].isnan().all())

    output = gpu_attention.shared_prefix_attention(q, k, v, (shared[0], shared[1]), layout, read_only=False)
    expected = attention.shared_prefix_attention(q[:tokens], k[:tokens], v[:tokens], expected_shared, segments)
    assert_same(output[:tokens], expected)
    asking = q.index_select(0, layout.read_rows)
    last = gpu_attention.shared_prefix_attention(asking, k, v, (shared[0], shared[1]), layout, read_only=True)
    assert_same(last[: len(segments.suffix_tokens)], expected[list(segments.last_rows)])
