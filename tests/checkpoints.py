"""Synthetic checkpoints for tests: the tiny one that `synthesize` writes, and a miniature that takes milliseconds.

Fixtures are made once a session; whoever changes a checkpoint changes a copy (`copy_checkpoint`, `rewrite`).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from engine.checkpoint import Pin, load_pin
from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.sizes import model_config
from engine.checkpoint.synthesize import PROVENANCE, make_pin, synthesize, write_checkpoint

IMAGE_PAD_ID = 256


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `synthesize --size tiny` and `export` make, with the whole vocabulary. Not to be changed."""
    root = tmp_path_factory.mktemp("tiny") / "checkpoint"
    pin = synthesize(root, "tiny", seed=0)
    export_checkpoint(root / "base", root / "adapter", root / "export", pin)
    return root


@pytest.fixture(scope="session")
def mini_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny structure with a vocabulary of 260 bytes and words: for tests of files. Not to be changed."""
    root = tmp_path_factory.mktemp("mini") / "checkpoint"
    pin = write_checkpoint(root, mini_config(), mini_tokenizer(), name="mini")
    export_checkpoint(root / "base", root / "adapter", root / "export", pin)
    return root


@pytest.fixture
def checkpoint(mini_checkpoint: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the miniature, to be broken with `rewrite`."""
    root = copy_checkpoint(mini_checkpoint, tmp_path / "checkpoint")
    yield root
    shutil.rmtree(root)


def mini_config() -> dict[str, object]:
    """`config.json` of the miniature."""
    raw = copy.deepcopy(model_config("tiny"))
    raw["image_token_id"] = IMAGE_PAD_ID
    text = raw["text_config"]
    assert isinstance(text, dict)
    text["vocab_size"] = 260
    return raw


def mini_tokenizer() -> dict[str, bytes]:
    """Single bytes (A-Z at unpublished ids), `<|image_pad|>`, a token that only `tokenizer_config.json` adds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    tokenizer = Tokenizer(models.BPE(vocab={byte: at for at, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_tokens([AddedToken("<|image_pad|>", normalized=False, special=True)])
    config = {
        "added_tokens_decoder": {
            str(IMAGE_PAD_ID): {"content": "<|image_pad|>", "special": True},
            str(IMAGE_PAD_ID + 1): {"content": "<|audio_pad|>", "special": True},
        }
    }
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def copy_checkpoint(source: Path, target: Path) -> Path:
    """A copy that shares the files' bytes: change it with `rewrite` only."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def rewrite(path: Path, content: bytes) -> None:
    """Put a new file in a file's place; other copies keep theirs."""
    path.unlink()
    path.write_bytes(content)


def repin(root: Path, *, export: bool = True) -> Pin:
    """Write a new pin for base and adapter as they are now, so that only what they hold can be wrong.

    With `export`, the export's manifest is made to agree with the new pin, although the export was not made again.
    """
    old = load_pin(root / "pin.json")
    pin = make_pin(root, old.name, "changed", PROVENANCE)
    rewrite(root / "pin.json", b"")
    pin.write(root / "pin.json")
    if export:
        manifest = json.loads((root / "export/manifest.json").read_bytes())
        manifest |= {key: pin.as_json()[key] for key in ("base", "adapter")}
        manifest["pin"]["sha256"] = pin.sha256
        write_manifest(root, manifest)
    return pin


def write_manifest(root: Path, manifest: dict[str, object]) -> None:
    """Write an export's manifest in its form."""
    rewrite(root / "export/manifest.json", (json.dumps(manifest, indent=2) + "\n").encode())
