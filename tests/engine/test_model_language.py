"""The language model and the read-out against Transformers and PEFT, and mutants that the comparison must notice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from engine.model import Model, letter_logits, letter_probabilities
from tests.engine import model_cases as cases
from tests.engine import reference as hf
from tests.engine.model_cases import (
    BF16_FACTOR,
    BF16_PROBABILITY,
    CLEAR_MARGIN,
    FLOAT32_TOLERANCE,
    PAIRS,
    Packed,
    relative_error,
)

WORST_CASE = ("plain", "three questions")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def packed(ours: Model, config: str, case: str) -> Packed:
    """The whole of what is shared as the prefix, with our own features."""
    asked = cases.request(config, case)
    features = ours.vision(asked.pixel_values, asked.grid)
    return cases.pack(ours, asked, features, 0, asked.case.shared_tokens)


def logits(ours: Model, config: str, case: str) -> torch.Tensor:
    last, _ = packed(ours, config, case).run(ours.language)
    return letter_logits(last, ours.language.letter_rows(hf.LETTER_IDS))


def logits_error(found: torch.Tensor, config: str, case: str) -> float:
    return relative_error(found, torch.stack(cases.expected(config, case).logits))


@pytest.mark.parametrize("config, case", PAIRS)
def test_positions_are_the_references(config: str, case: str) -> None:
    for question, theirs in enumerate(cases.expected(config, case).positions):
        assert torch.equal(cases.prompt_positions(cases.CASES[case], question), theirs)


@pytest.mark.parametrize("config, case", PAIRS)
def test_every_layer_and_the_logits_in_float32(config: str, case: str) -> None:
    ours, theirs = cases.model(config), cases.expected(config, case)
    rows = packed(ours, config, case)
    layers = list(ours.language.run(rows.hidden, rows.positions, rows.segments))
    for question, outputs in enumerate(theirs.layers):
        assert len(outputs) == len(layers)
        for found, output in zip(layers, outputs, strict=True):
            assert relative_error(found.hidden[rows.rows_of(question)], output) <= FLOAT32_TOLERANCE
    assert logits_error(logits(ours, config, case), config, case) <= FLOAT32_TOLERANCE


def test_probabilities_in_bf16_err_as_the_reference_does() -> None:
    ours, theirs, clear, agreed = [], [], 0, 0
    questions = 0
    for config, case in PAIRS:
        options = cases.CASES[case].options()
        exact = letter_probabilities(torch.stack(cases.expected(config, case).logits), options)
        rounded = letter_probabilities(torch.stack(cases.expected(config, case, torch.bfloat16).logits), options)
        found = letter_probabilities(logits(cases.model(config, torch.bfloat16), config, case), options)
        ours.append(float((found - exact).abs().max()))
        theirs.append(float((rounded - exact).abs().max()))
        top = exact.topk(2).values
        is_clear = top[:, 0] - top[:, 1] >= CLEAR_MARGIN
        questions, clear = questions + len(options), clear + int(is_clear.sum())
        agreed += int((is_clear & (found.argmax(1) == exact.argmax(1))).sum())
    assert clear >= 0.75 * questions, "too few questions with a clear choice: the set proves nothing"
    assert agreed == clear
    assert 0 < max(ours) <= BF16_FACTOR * max(theirs) + BF16_PROBABILITY


def test_probabilities_are_a_softmax_over_the_letters_in_use() -> None:
    values = torch.randn(3, 26, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = letter_probabilities(values, [1, 4, 26])
    assert found.dtype == torch.float32 and found.shape == (3, 26)
    for row, count in enumerate((1, 4, 26)):
        assert torch.allclose(found[row, :count], values[row, :count].float().softmax(0), rtol=1e-6, atol=0)
        assert torch.equal(found[row, count:], torch.zeros(26 - count))


@pytest.mark.parametrize("options", ([0], [27], [3, 3]))
def test_impossible_option_counts(options: list[int]) -> None:
    with pytest.raises(AssertionError):
        letter_probabilities(torch.zeros(1, 26), options)


def test_mutant_swapped_axes() -> None:
    ours, theirs = cases.model("plain"), cases.expected(*WORST_CASE)
    rows = packed(ours, *WORST_CASE)
    swapped = Packed(rows.hidden, rows.positions[[0, 2, 1]], rows.segments)
    last, _ = swapped.run(ours.language)
    found = letter_logits(last, ours.language.letter_rows(hf.LETTER_IDS))
    assert relative_error(found, torch.stack(theirs.logits)) > 10 * FLOAT32_TOLERANCE


@pytest.mark.parametrize("factor", (0.0, 0.5))
def test_mutant_adapter_not_merged_or_with_scale_one(factor: float) -> None:
    with cases.checkpoint("plain") as paths:
        hf.rewrite_export(paths, factor)
        assert logits_error(logits(cases.load(paths), *WORST_CASE), *WORST_CASE) > 10 * FLOAT32_TOLERANCE


def test_the_export_is_rewritten_faithfully() -> None:
    """What the mutants above change is only the factor."""
    with cases.checkpoint("plain") as paths:
        hf.rewrite_export(paths, 1.0)
        assert logits_error(logits(cases.load(paths), *WORST_CASE), *WORST_CASE) <= FLOAT32_TOLERANCE


LANGUAGE_TENSORS = [
    *(f"layers.{layer}.{name}_layernorm.weight" for layer, name in product((0, 3), ("input", "post_attention"))),
    *(f"layers.1.linear_attn.{name}" for name in ("dt_bias", "A_log", "norm.weight", "conv1d.weight")),
    *(f"layers.1.linear_attn.in_proj_{part}.weight" for part in ("z", "b", "a")),
    *(f"layers.3.self_attn.{name}_norm.weight" for name in ("q", "k")),
    "norm.weight",
]


@pytest.mark.parametrize("name", LANGUAGE_TENSORS)
def test_mutant_missing_tensor(name: str) -> None:
    with cases.checkpoint("plain") as paths:
        hf.scale_tensors(paths.export / hf.EXPORT_FILE, f"model.language_model.{name}", 0.0)
        assert logits_error(logits(cases.load(paths), *WORST_CASE), *WORST_CASE) > 10 * FLOAT32_TOLERANCE
