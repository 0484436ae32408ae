"""The chunked delta rule against the plain recurrence, with states and segments."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kernels.delta_rule import chunked, decay_and_strength, gated_delta_rule, recurrent
from kernels.norms import l2_norm
from kernels.segments import Segments
from tests.kernels.oracles import DTYPES, assert_close, error, rand

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 16, 24
LENGTHS = (1, 63, 64, 65, 129)
# Both forms are float32; the outputs are rounded to v's dtype.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 4e-3}


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def rows(self, *parts: slice) -> Inputs:
        return Inputs(*(torch.cat([x[part] for part in parts]) for x in self))


def inputs(tokens: int, dtype: torch.dtype = torch.float32, decay: float = 1.0) -> Inputs:
    return Inputs(
        l2_norm(rand(tokens, KEY_HEADS, KEY_DIM, seed=1)),
        l2_norm(rand(tokens, KEY_HEADS, KEY_DIM, seed=2)),
        rand(tokens, VALUE_HEADS, VALUE_DIM, seed=3, dtype=dtype),
        -decay * rand(tokens, VALUE_HEADS, seed=4).abs(),
        torch.sigmoid(rand(tokens, VALUE_HEADS, seed=5, dtype=dtype)),
    )


def memory(seed: int) -> torch.Tensor:
    return rand(VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("with_state", (False, True))
def test_chunked_equals_the_recurrence(tokens: int, with_state: bool, dtype: torch.dtype) -> None:
    x = inputs(tokens, dtype)
    state = memory(6) if with_state else torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM)
    found, found_end = chunked(*x, state)
    oracle, oracle_end = recurrent(*x, state)
    assert found.dtype == oracle.dtype == dtype and found_end.dtype == torch.float32
    assert error(found, oracle) <= TOLERANCES[dtype]
    assert error(found_end, oracle_end) <= TOLERANCES[torch.float32]


def test_the_recurrence_is_its_definition() -> None:
    x, state = inputs(5), memory(6).double()
    found, end = recurrent(*x, memory(6))
    group = VALUE_HEADS // KEY_HEADS
    for t in range(5):
        for head in range(VALUE_HEADS):
            q, k = x.q[t, head // group].double(), x.k[t, head // group].double()
            s = state[head] * x.g[t, head].double().exp()
            s = s + torch.outer(k, x.beta[t, head].double() * (x.v[t, head].double() - s.T @ k))
            state[head] = s
            assert error(found[t, head], s.T @ q / KEY_DIM**0.5) <= 1e-5
    assert error(end, state) <= 1e-6


@pytest.mark.parametrize("decay", (0.0, 1e-4, 50.0, 1000.0))
def test_any_decay_stays_finite(decay: float) -> None:
    x = inputs(130, decay=decay)
    found, end = chunked(*x, memory(6))
    oracle, oracle_end = recurrent(*x, memory(6))
    assert error(found, oracle) <= 2e-5
    assert error(end, oracle_end) <= 2e-5


@pytest.mark.parametrize("with_state", (False, True))
@pytest.mark.parametrize("prefix_tokens", (0, 1, 64, 100, 128))
def test_suffixes_continue_from_the_prefix_and_not_from_each_other(prefix_tokens: int, with_state: bool) -> None:
    segments = Segments(prefix_tokens, (70, 1, 5))
    x = inputs(segments.tokens)
    state = memory(6) if with_state else torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM)
    found, end = gated_delta_rule(*x, state if with_state else None, segments)
    oracle, _ = recurrent(*x.rows(segments.prefix, segments.suffixes[0]), state)
    assert_close_rows(found[: prefix_tokens + 70], oracle)
    for rows in segments.suffixes:
        oracle, _ = recurrent(*x.rows(segments.prefix, rows), state)
        assert_close_rows(found[rows], oracle[prefix_tokens:])
    if prefix_tokens:
        assert error(end, recurrent(*x.rows(segments.prefix), state)[1]) <= TOLERANCES[torch.float32]
    else:
        assert torch.equal(end, state)


def test_queries_and_keys_are_brought_to_length_one() -> None:
    x, segments = inputs(70), Segments(64, (6,))
    longer = x._replace(q=3.0 * x.q, k=0.5 * x.k)
    found, end = gated_delta_rule(*longer, memory(6), segments)
    oracle, oracle_end = gated_delta_rule(*x, memory(6), segments)
    assert error(found, oracle) <= TOLERANCES[torch.float32]
    assert error(end, oracle_end) <= TOLERANCES[torch.float32]


def assert_close_rows(found: torch.Tensor, oracle: torch.Tensor) -> None:
    assert error(found, oracle) <= TOLERANCES[torch.float32]


def test_cut_at_a_chunk_and_continued_equals_uncut() -> None:
    x = inputs(200)
    whole, whole_end = gated_delta_rule(*x, None, Segments(200, ()))
    for cut in (64, 128, 192):
        first, state = gated_delta_rule(*x.rows(slice(cut)), None, Segments(cut, ()))
        second, end = gated_delta_rule(*x.rows(slice(cut, None)), state, Segments(200 - cut, ()))
        assert error(torch.cat([first, second]), whole) <= 1e-6
        assert error(end, whole_end) <= 1e-6


def test_the_given_state_is_not_changed() -> None:
    state = memory(6)
    gated_delta_rule(*inputs(70), state, Segments(64, (6,)))
    assert torch.equal(state, memory(6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decay_and_strength(dtype: torch.dtype) -> None:
    # Slices of wider rows, as the fused projection gives them.
    a, b = rand(9, 12, seed=1, dtype=dtype)[:, :6], rand(9, 12, seed=2, dtype=dtype)[:, 6:]
    a_log, dt_bias = rand(6, seed=3, dtype=dtype), rand(6, seed=4, dtype=dtype)
    g, beta = decay_and_strength(a, b, a_log, dt_bias)
    assert g.dtype == torch.float32 and bool((g <= 0).all())
    softplus = (a.double() + dt_bias.double()).exp().log1p()
    assert error(g, -a_log.double().exp() * softplus) <= 2e-6
    assert_close(beta, 1 / (1 + (-b.double()).exp()), dtype)
