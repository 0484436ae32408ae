"""One packed pass against whole prompts one at a time; runs that continue from a state; the states themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.model import Segments, State
from engine.model.state import DeltaState, KeyValueState
from tests.engine import model_cases as cases
from tests.engine.model_cases import CONFIGS, Packed, relative_error

# The same float32 numbers summed in other groupings, through all layers.
TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def packed(config: str, case: str, start: int, cut: int) -> Packed:
    ours, asked = cases.model(config), cases.request(config, case)
    return cases.pack(ours, asked, ours.vision(asked.pixel_values, asked.grid), start, cut)


def one_at_a_time(config: str, case: str) -> torch.Tensor:
    """Every question's last row, from a pass of its own over its whole prompt."""
    whole = packed(config, case, 0, 0)
    lasts = []
    for rows in whole.segments.suffixes:
        alone = Packed(whole.hidden[rows], whole.positions[:, rows], Segments(rows.stop - rows.start, ()))
        # The prefix is the whole prompt: its last row is not read out by `prefill`, but it is what `run` ends with.
        *_, last_layer = cases.model(config).language.run(alone.hidden, alone.positions, alone.segments)
        lasts.append(last_layer.normed[-1])
    return torch.stack(lasts)


def cuts(case: str) -> list[int]:
    """No prefix, one token, just before, at and after a chunk, all that is shared."""
    shared = cases.CASES[case].shared_tokens
    return sorted({cut for cut in (0, 1, 63, 64, 65, shared // 64 * 64, shared) if cut <= shared})


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", ("one token", "three questions", "eight questions, tall"))
def test_packed_equals_one_at_a_time(config: str, case: str) -> None:
    oracle = one_at_a_time(config, case)
    for cut in cuts(case):
        last, state = packed(config, case, 0, cut).run(cases.model(config).language)
        assert relative_error(last, oracle) <= TOLERANCE, cut
        assert state.tokens == cut


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", ("three questions", "long, wide"))
def test_continued_from_a_state_equals_uncut(config: str, case: str) -> None:
    """The system prompt's state, then the image's on top of it, then the questions on top of that."""
    language, shape = cases.model(config).language, cases.CASES[case]
    oracle = one_at_a_time(config, case)
    for first, second in ((shape.head_tokens, shape.shared_tokens), (64, 64), (1, shape.shared_tokens // 64 * 64)):
        head = packed(config, case, 0, first)
        _, head_state = prefix_only(head).run(language)
        _, image_state = (
            prefix_only(packed(config, case, first, second)).run(language, head_state)
            if second > first
            else (None, head_state)
        )
        assert (head_state.tokens, image_state.tokens) == (first, second)
        last, state = packed(config, case, second, second).run(language, image_state)
        assert relative_error(last, oracle) <= TOLERANCE
        assert state.tokens == second
        last, state = packed(config, case, first, second).run(language, head_state)
        assert relative_error(last, oracle) <= TOLERANCE
        assert state.tokens == second


def prefix_only(whole: Packed) -> Packed:
    tokens = whole.segments.prefix_tokens
    return Packed(whole.hidden[:tokens], whole.positions[:, :tokens], Segments(tokens, ()))


def test_a_pass_without_suffixes_has_no_last_rows() -> None:
    ours = cases.model("plain")
    last, _ = prefix_only(packed("plain", "three questions", 0, 64)).run(ours.language)
    assert last.shape == (0, ours.config.text.hidden_size)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_same_pass_gives_the_same_bits(dtype: torch.dtype) -> None:
    ours, asked = cases.model("plain", dtype), cases.request("plain", "three questions")

    def once() -> tuple[torch.Tensor, State]:
        features = ours.vision(asked.pixel_values, asked.grid)
        return cases.pack(ours, asked, features, 0, 64).run(ours.language)

    (first, first_state), (second, second_state) = once(), once()
    assert torch.equal(first, second)
    for one, other in zip(first_state.layers, second_state.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_question_does_not_depend_on_the_others() -> None:
    language, whole = cases.model("plain").language, packed("plain", "three questions", 0, 64)
    last, _ = whole.run(language)
    for question, rows in enumerate(whole.segments.suffixes):
        keep = torch.cat([torch.arange(64), torch.arange(rows.start, rows.stop)])
        alone = Packed(whole.hidden[keep], whole.positions[:, keep], Segments(64, (rows.stop - rows.start,)))
        assert relative_error(alone.run(language)[0][0], last[question]) <= TOLERANCE


def test_a_state_is_not_changed_by_runs_that_start_from_it() -> None:
    language = cases.model("plain").language
    _, state = prefix_only(packed("plain", "three questions", 0, 64)).run(language)
    before = state.copy()
    for cut in (64, 94):  # the questions straight from the state, and after more of the prefix
        packed("plain", "three questions", 64, cut).run(language, state)
    for one, other in zip(state.layers, before.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_states_contents_and_size() -> None:
    ours = cases.model("plain", torch.bfloat16)
    asked = cases.request("plain", "three questions")
    features = ours.vision(asked.pixel_values, asked.grid)
    _, state = cases.pack(ours, asked, features, 0, 64).run(ours.language)
    text = ours.config.text
    for kind, layer in zip(text.layer_types, state.layers, strict=True):
        if kind == "linear_attention":
            assert isinstance(layer, DeltaState)
            assert layer.conv.shape == (3, text.linear_conv_size) and layer.conv.dtype == torch.bfloat16
            assert layer.memory.shape == (4, 64, 32) and layer.memory.dtype == torch.float32
        else:
            assert isinstance(layer, KeyValueState)
            assert layer.keys.shape == layer.values.shape == (64, 2, 32) and layer.keys.dtype == torch.bfloat16
    delta_bytes = 3 * text.linear_conv_size * 2 + 4 * 64 * 32 * 4
    assert state.size_bytes == 3 * delta_bytes + 2 * 64 * 2 * 32 * 2


def test_a_copied_state_holds_no_more_than_itself() -> None:
    ours = cases.model("plain")
    _, state = packed("plain", "three questions", 0, 64).run(ours.language)
    copied = state.copy()
    held_bytes = sum(tensor.untyped_storage().nbytes() for layer in copied.layers for tensor in layer)
    assert held_bytes == copied.size_bytes == state.size_bytes


def mutated(state: State, kind: str) -> State:
    """The state with one part of it dropped."""

    def drop(layer: DeltaState | KeyValueState) -> DeltaState | KeyValueState:
        if isinstance(layer, DeltaState):
            conv = torch.zeros_like(layer.conv) if kind == "conv" else layer.conv
            return DeltaState(conv, torch.zeros_like(layer.memory) if kind == "memory" else layer.memory)
        if kind == "keys and values":
            return KeyValueState(layer.keys[:0], layer.values[:0])
        return KeyValueState(layer.keys.flip(0), layer.values) if kind == "keys turned around" else layer

    return replace(state, layers=tuple(map(drop, state.layers)))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ("conv", "memory", "keys and values", "keys turned around"))
def test_mutant_prefix_state_dropped(config: str, kind: str) -> None:
    language, case = cases.model(config).language, "three questions"
    _, state = prefix_only(packed(config, case, 0, 64)).run(language)
    last, _ = packed(config, case, 64, 64).run(language, mutated(state, kind))
    assert relative_error(last, one_at_a_time(config, case)) > 10 * TOLERANCE


def test_mutant_suffixes_that_see_each_other() -> None:
    """All suffixes as one: what the segments keep apart is what matters."""
    language, whole = cases.model("plain").language, packed("plain", "three questions", 0, 64)
    joined = replace(whole, segments=Segments(64, (sum(whole.segments.suffix_tokens),)))
    last, _ = joined.run(language)
    assert relative_error(last[-1], one_at_a_time("plain", "three questions")[-1]) > 10 * TOLERANCE


@pytest.mark.parametrize("segments", (Segments(63, ()), Segments(65, ())))
def test_rows_that_do_not_fill_the_segments_are_refused(segments: Segments) -> None:
    whole = prefix_only(packed("plain", "three questions", 0, 64))
    with pytest.raises(AssertionError):
        replace(whole, segments=segments).run(cases.model("plain").language)


def test_rows_of_another_width_are_refused() -> None:
    whole, language = prefix_only(packed("plain", "three questions", 0, 64)), cases.model("plain").language
    for wrong in (replace(whole, hidden=whole.hidden[:, 1:]), replace(whole, positions=whole.positions[:, 1:])):
        with pytest.raises(AssertionError):
            wrong.run(language)


# Full attention is the last layer of one config and the first of the other.
@pytest.mark.parametrize("config", ("plain", "ungrouped"))
def test_a_state_of_another_model_is_refused(config: str) -> None:
    """Of fewer or more layers, or of layers of another kind."""
    language = cases.model(config).language
    _, state = prefix_only(packed(config, "three questions", 0, 64)).run(language)
    delta = next(layer for layer in state.layers if isinstance(layer, DeltaState))
    attention = next(layer for layer in state.layers if isinstance(layer, KeyValueState))
    count = len(state.layers)
    for layers in (state.layers[:-1], (*state.layers, attention), (delta,) * count, (attention,) * count):
        with pytest.raises(AssertionError):
            packed(config, "three questions", 64, 64).run(language, replace(state, layers=layers))
