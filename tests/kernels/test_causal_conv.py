"""The causal convolution against its definition, with states and segments."""

from __future__ import annotations

import pytest
import torch

from kernels.causal_conv import causal_conv, conv_silu_split
from kernels.segments import Segments
from tests.kernels.oracles import DTYPES, assert_close, rand

CHANNELS, WIDTH = 24, 4
LENGTHS = (1, 2, 3, 4, 63, 64, 65, 129)


def definition(x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Token by token in float64."""
    rows = torch.cat([before, x]).double()
    width = weight.shape[1]
    return torch.stack([(rows[t : t + width] * weight.double().T).sum(0) for t in range(len(x))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("with_state", (False, True))
def test_one_sequence(tokens: int, with_state: bool, dtype: torch.dtype) -> None:
    x, weight = rand(tokens, CHANNELS, seed=1, dtype=dtype), rand(CHANNELS, WIDTH, seed=2, dtype=dtype)
    before = (
        rand(WIDTH - 1, CHANNELS, seed=3, dtype=dtype) if with_state else torch.zeros(WIDTH - 1, CHANNELS, dtype=dtype)
    )
    found, end = causal_conv(x, weight, before if with_state else None, Segments(tokens, ()))
    assert_close(found, definition(x, weight, before), dtype)
    assert torch.equal(end, torch.cat([before, x])[-(WIDTH - 1) :])


@pytest.mark.parametrize("prefix_tokens", (0, 1, 2, 5, 64))
def test_suffixes_continue_from_the_prefix_and_not_from_each_other(prefix_tokens: int) -> None:
    segments = Segments(prefix_tokens, (3, 1, 7))
    x = rand(segments.tokens, CHANNELS + 5, seed=1)[:, 2 : 2 + CHANNELS]  # a slice of wider rows
    weight, state = rand(CHANNELS, WIDTH, seed=2), rand(WIDTH - 1, CHANNELS, seed=3)
    found, _ = causal_conv(x, weight, state, segments)
    for rows in segments.suffixes:
        whole = definition(torch.cat([x[: segments.prefix_tokens], x[rows]]), weight, state)
        assert_close(found[rows], whole[prefix_tokens:], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cut_and_continued_equals_uncut(dtype: torch.dtype) -> None:
    x, weight = rand(40, CHANNELS, seed=1, dtype=dtype), rand(CHANNELS, WIDTH, seed=2, dtype=dtype)
    whole, whole_end = causal_conv(x, weight, None, Segments(40, ()))
    for cut in (1, 2, 3, 20, 39):
        first, state = causal_conv(x[:cut], weight, None, Segments(cut, ()))
        second, end = causal_conv(x[cut:], weight, state, Segments(40 - cut, ()))
        assert torch.equal(torch.cat([first, second]), whole)
        assert torch.equal(end, whole_end)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_split_gives_queries_keys_and_values_after_silu(dtype: torch.dtype) -> None:
    key_heads, value_heads, key_dim, value_dim = 2, 3, 4, 5
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    segments = Segments(9, (4, 2))
    x, weight = rand(15, channels, seed=1, dtype=dtype), rand(channels, WIDTH, seed=2, dtype=dtype)
    conv, end = causal_conv(x, weight, None, segments)
    q, k, v, found_end = conv_silu_split(x, weight, None, segments, key_heads, value_heads, key_dim)
    mixed = conv.double() / (1 + (-conv.double()).exp())
    for found, columns in ((q, mixed[:, :8]), (k, mixed[:, 8:16])):
        assert_close(found, columns.reshape(15, key_heads, key_dim), dtype)
    assert_close(v, mixed[:, 16:].reshape(15, value_heads, value_dim), dtype)
    assert torch.equal(found_end, end)
