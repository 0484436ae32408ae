"""Attention against an explicit softmax in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import (
    continued,
    extended,
    full_attention,
    gate_output,
    last_rows_attention,
    shared_prefix_attention,
)
from kernels.segments import Segments
from tests.kernels.oracles import DTYPES, assert_close, rand

HEADS, KV_HEADS, WIDTH = 6, 2, 16
Pair = tuple[torch.Tensor, torch.Tensor]


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """The queries are the last tokens of the keys."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / q.shape[2] ** 0.5
    if causal:
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(unseen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("patches", (1, 63, 130))
def test_full_attention(patches: int, dtype: torch.dtype) -> None:
    q, k, v = (rand(patches, HEADS, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    assert_close(full_attention(q, k, v), explicit(q, k, v, causal=False), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("past_tokens", (0, 1, 65))
@pytest.mark.parametrize("prefix_tokens", (0, 1, 64))
def test_suffixes_see_past_prefix_and_themselves(prefix_tokens: int, past_tokens: int, dtype: torch.dtype) -> None:
    segments = Segments(prefix_tokens, (5, 1, 66))
    q = rand(segments.tokens, HEADS, WIDTH, seed=1, dtype=dtype)
    k, v = (rand(segments.tokens, KV_HEADS, WIDTH, seed=seed, dtype=dtype) for seed in (2, 3))
    past = (
        (
            rand(past_tokens, KV_HEADS, WIDTH, seed=4, dtype=dtype),
            rand(past_tokens, KV_HEADS, WIDTH, seed=5, dtype=dtype),
        )
        if past_tokens
        else None
    )
    shared = extended(past, k, v, segments)
    found = shared_prefix_attention(q, k, v, shared, segments)
    if prefix_tokens:
        oracle = explicit(q[segments.prefix], *shared, causal=True)
        assert_close(found[segments.prefix], oracle, dtype)
    for rows in segments.suffixes:
        oracle = explicit(q[rows], *continued(shared, (k[rows], v[rows])), causal=True)
        assert_close(found[rows], oracle, dtype)
    last = list(segments.last_rows)
    assert_close(last_rows_attention(q[last], k, v, shared, segments), found[last].double(), dtype)


def test_continued_joins_keys_and_values_in_order() -> None:
    past, new = (rand(2, 1, 4, seed=1), rand(2, 1, 4, seed=2)), (rand(3, 1, 4, seed=3), rand(3, 1, 4, seed=4))
    assert continued(None, new) is new
    keys, values = continued(past, new)
    assert torch.equal(keys, torch.cat([past[0], new[0]])) and torch.equal(values, torch.cat([past[1], new[1]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_gate_is_a_sigmoid(dtype: torch.dtype) -> None:
    attended, gate = rand(5, 8, seed=1, dtype=dtype), rand(5, 12, seed=2, dtype=dtype)[:, 2:10]
    assert_close(gate_output(attended, gate), attended.double() / (1 + (-gate.double()).exp()), dtype)
