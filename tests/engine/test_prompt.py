"""Prompts against the golden vectors: tokens and positions, with the tokenizer that synthetic checkpoints get."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.checkpoint.tokenizer import build_tokenizer
from engine.errors import CheckpointError
from engine.prompt import PromptEncoder, Question, positions
from producer import contract

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent.parent / "vectors" / "prompts.json").read_text())


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    return build_tokenizer()["tokenizer.json"].decode()


@pytest.fixture(scope="module")
def encoder(tokenizer_json: str) -> PromptEncoder:
    return PromptEncoder(Tokenizer.from_str(tokenizer_json))


def question_of(case: dict[str, Any]) -> Question:
    parsed = contract.Question.model_validate(case["question"])
    return Question("q", parsed.goal, parsed.labels)


def sha256(values: torch.Tensor) -> str:
    return hashlib.sha256(values.to(torch.int64).numpy().astype("<i8").tobytes()).hexdigest()


def test_the_vectors_are_there() -> None:
    assert len(CASES) == 12


def test_the_constant_head_and_the_letters(encoder: PromptEncoder) -> None:
    assert len(encoder.head_ids) == 79
    assert encoder.letter_ids == tuple(range(32, 58))
    assert encoder.image_pad_id == 248056


@pytest.mark.parametrize("name", sorted(CASES))
def test_tokens_are_the_references(encoder: PromptEncoder, name: str) -> None:
    case = CASES[name]
    _, rows, columns = case["grid"]
    image_tokens = rows * columns // 4
    ids = encoder.prompt_ids(question_of(case), image_tokens)
    assert len(ids) == case["num_tokens"]
    assert ids.index(encoder.image_pad_id) == case["image_start"]
    assert [token for token in ids if token != encoder.image_pad_id] == case["token_ids_without_image"]
    assert sha256(torch.tensor(ids)) == case["token_ids_sha256"]


@pytest.mark.parametrize("name", sorted(CASES))
def test_positions_are_the_references_on_all_three_axes(encoder: PromptEncoder, name: str) -> None:
    case = CASES[name]
    _, rows, columns = case["grid"]
    tail = encoder.tail_ids(question_of(case))
    axes = positions(len(encoder.head_ids), (rows // 2, columns // 2), len(tail))
    assert [sha256(axis) for axis in axes] == case["position_ids_sha256"]
    assert axes[:, -1].tolist() == case["positions_tail"]


def test_a_letter_that_is_not_one_token_is_no_tokenizer_for_us(tokenizer_json: str) -> None:
    spoiled = json.loads(tokenizer_json)
    # Without its one-byte token the letter falls apart into nothing.
    del spoiled["model"]["vocab"]["Q"]
    spoiled["model"]["merges"] = []
    with pytest.raises(CheckpointError, match="'Q' is 0 tokens"):
        PromptEncoder(Tokenizer.from_str(json.dumps(spoiled)))
