"""Breaking a checkpoint in one way, and hearing what verification says of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import open_checkpoint, verify_checkpoint
from engine.checkpoint.verify import Verified
from engine.errors import CheckpointError
from tests.checkpoints import repin, rewrite, write_manifest

FIRST_SHARD = "base/model.safetensors-00001-of-00002.safetensors"
SHARD = "base/model.safetensors-00002-of-00002.safetensors"
ADAPTER = "adapter/multimodal/adapter_model.safetensors"
ADAPTER_CONFIG = "adapter/multimodal/adapter_config.json"
EXPORT = "export/model.safetensors"
FILES = [
    "base/config.json",
    "base/preprocessor_config.json",
    FIRST_SHARD,
    SHARD,
    "base/model.safetensors.index.json",
    "base/tokenizer.json",
    "base/tokenizer_config.json",
    ADAPTER_CONFIG,
    ADAPTER,
    EXPORT,
    "export/config.json",
    "export/tokenizer.json",
    "export/tokenizer_config.json",
]


def verify(root: Path) -> Verified:
    return verify_checkpoint(open_checkpoint(root))


def mismatches(root: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as refused:
        verify(root)
    return refused.value.mismatches


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    rewrite(path, bytes(content))


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    rewrite(path, json.dumps(content).encode())


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(**changes: object) -> Callable[[Any], None]:
    return lambda content: content.update(changes)


def repin_all(root: Path) -> None:
    """Pin base and adapter as they are now, and let the manifest say what the export is now."""
    repin(root)
    manifest = json.loads((root / "export/manifest.json").read_bytes())
    pinned = repin_files(root / "export")
    write_manifest(root, manifest | {"files": pinned})


def repin_files(export: Path) -> dict[str, object]:
    return {
        path.name: {"size_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(export.iterdir())
        if path.name != "manifest.json"
    }
