"""Synthetic checkpoints: the same seed gives the same bytes, values have their distributions, files are readable."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engine.checkpoint import Pin, load_pin, published_pin
from engine.checkpoint.recipe import BLOCK_VALUES, block_bytes, block_count
from engine.checkpoint.synthesize import remove_synthetic, synthesize, write_checkpoint
from engine.checkpoint.tensor_files import Tensor
from engine.errors import CheckpointError
from tests.checkpoints import mini_config, mini_tokenizer

SHARDS = [f"model.safetensors-0000{number}-of-00002.safetensors" for number in (1, 2)]


def hashes(root: Path) -> dict[str, str]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write(out: Path, seed: int = 0) -> Pin:
    return write_checkpoint(out, mini_config(), mini_tokenizer(), name="mini", seed=seed)


def test_the_same_seed_gives_the_same_bytes_whatever_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    write(tmp_path / "b")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def test_another_seed_gives_other_weights_and_another_identity(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", seed=0), write(tmp_path / "b", seed=1)
    assert first.identity != second.identity
    a, b = hashes(tmp_path / "a"), hashes(tmp_path / "b")
    changed = {path for path in a if a[path] != b[path]}
    assert changed == {
        *(f"base/{shard}" for shard in SHARDS),
        "adapter/multimodal/adapter_model.safetensors",
        "pin.json",
    }


def test_the_tiny_checkpoint_lies_in_the_published_layout(tiny_checkpoint: Path) -> None:
    base = {path.name for path in (tiny_checkpoint / "base").iterdir()}
    assert base == {
        *SHARDS,
        "model.safetensors.index.json",
        "config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    adapter = {
        str(path.relative_to(tiny_checkpoint / "adapter")) for path in (tiny_checkpoint / "adapter").rglob("*.*")
    }
    assert adapter == {"multimodal/adapter_config.json", "multimodal/adapter_model.safetensors"}
    pin = load_pin(tiny_checkpoint / "pin.json")
    assert pin.identity == f"synthetic-tiny-0@{pin.sha256[:12]}"
    assert set(pin.base.files) == base


def test_its_files_are_what_the_index_says_and_safetensors_reads(tiny_checkpoint: Path) -> None:
    index = json.loads((tiny_checkpoint / "base/model.safetensors.index.json").read_bytes())
    found: dict[str, str] = {}
    for shard in SHARDS:
        with safe_open(tiny_checkpoint / "base" / shard, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), shard)
    assert found == index["weight_map"]
    assert set(found.values()) == set(SHARDS)


def test_values_have_the_recipe_s_distributions(tiny_checkpoint: Path) -> None:
    """Means and deviations within five standard errors, over all tensors of a kind together."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in SHARDS:
        tensors |= load_file(tiny_checkpoint / "base" / shard)
    tensors |= load_file(tiny_checkpoint / "adapter/multimodal/adapter_model.safetensors")

    def gather(*endings: str, at: str = "", scaled: bool = False) -> torch.Tensor:
        picked = [t.double() for name, t in tensors.items() if name.endswith(endings) and name.startswith(at)]
        return torch.cat([(t * math.prod(t.shape[1:]) ** 0.5 if scaled else t).flatten() for t in picked])

    expected = {
        "embedding": (gather("embed_tokens.weight", "pos_embed.weight"), 0.0, 0.04),
        "linear": (gather("_proj.weight", "qkv.weight", "conv1d.weight", ".lora_A.weight", scaled=True), 0.0, 1.0),
        "lora B": (gather(".lora_B.weight"), 0.0, 0.02),
        "bias": (gather(".bias"), 0.0, 0.02),
        "dt_bias": (gather(".dt_bias"), -4.0, 2.0),
        "norm around 0": (gather("layernorm.weight", "q_norm.weight", "k_norm.weight"), 0.0, 0.1),
        "gated norm": (gather("linear_attn.norm.weight"), 1.0, 0.1),
        "LayerNorm": (gather("norm1.weight", "norm2.weight", "merger.norm.weight", at="model.visual."), 1.0, 0.1),
        "A": (gather(".A_log").exp(), (0.01 + 16) / 2, (16 - 0.01) / 12**0.5),
    }
    for kind, (values, mean, deviation) in expected.items():
        error = deviation / len(values) ** 0.5
        assert abs(values.mean().item() - mean) < 5 * error, kind
        assert abs(values.std().item() - deviation) < 5 * error, kind
    assert expected["A"][0].min() >= 0.01
    assert expected["A"][0].max() <= 16.01  # float32 rounding of the logarithm


def test_bfloat16_values_are_the_float32_values_rounded_as_torch_rounds() -> None:
    shape = (300, 1000)
    wide = torch.frombuffer(bytearray(block_bytes(Tensor("x.weight", "F32", shape, 0), 0, 3)), dtype=torch.float32)
    narrow = torch.frombuffer(bytearray(block_bytes(Tensor("x.weight", "BF16", shape, 0), 0, 3)), dtype=torch.bfloat16)
    assert torch.equal(wide.to(torch.bfloat16), narrow)


def test_blocks_of_a_tensor_differ_and_cover_it() -> None:
    tensor = Tensor("x.weight", "BF16", (BLOCK_VALUES * 2 + 5,), 0)
    blocks = [block_bytes(tensor, block, 0) for block in range(block_count(tensor))]
    assert [len(block) for block in blocks] == [2 * BLOCK_VALUES, 2 * BLOCK_VALUES, 10]
    assert blocks[0] != blocks[1]
    assert not blocks[0].startswith(blocks[2])


def test_the_published_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="published"):
        synthesize(tmp_path / "out", "tiny", name=published_pin().name)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(checkpoint: Path) -> None:
    before = hashes(checkpoint)
    with pytest.raises(FileExistsError, match="is there already"):
        write(checkpoint)
    assert hashes(checkpoint) == before


def test_only_a_synthetic_checkpoint_is_removed(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="remove it by hand"):
        remove_synthetic(other)
    published_pin().write(other / "pin.json")
    with pytest.raises(FileExistsError, match="remove it by hand"):
        remove_synthetic(other)
    assert (other / "file").read_text() == "mine"
    (other / "copy").symlink_to(checkpoint)
    with pytest.raises(OSError, match="symbolic link"):
        remove_synthetic(other / "copy")
    remove_synthetic(tmp_path / "absent")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError("disk full")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
