"""Synthetic checkpoints: the same seed gives the same bytes, values have their distributions, files are readable."""

from __future__ import annotations

import hashlib
import json
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


L = "model.language_model.layers.0."
V = "model.visual."


@pytest.mark.parametrize(
    ("name", "shape", "mean", "deviation"),
    [
        ("model.language_model.embed_tokens.weight", (1000, 900), 0.0, 0.04),
        (f"{V}pos_embed.weight", (1000, 900), 0.0, 0.04),
        (f"{L}self_attn.q_proj.weight", (1000, 900), 0.0, 1 / 30),
        (f"{L}linear_attn.conv1d.weight", (200_000, 1, 4), 0.0, 0.5),
        (f"{V}patch_embed.proj.weight", (1000, 3, 2, 10, 15), 0.0, 1 / 30),
        ("base_model.model.model.visual.merger.linear_fc1.lora_A.weight", (1000, 900), 0.0, 1 / 30),
        ("base_model.model.model.visual.merger.linear_fc1.lora_B.weight", (1000, 900), 0.0, 0.02),
        (f"{V}blocks.0.attn.qkv.bias", (900_000,), 0.0, 0.02),
        (f"{L}linear_attn.dt_bias", (900_000,), -4.0, 2.0),
        (f"{L}input_layernorm.weight", (900_000,), 0.0, 0.1),
        (f"{L}self_attn.k_norm.weight", (900_000,), 0.0, 0.1),
        ("model.language_model.norm.weight", (900_000,), 0.0, 0.1),
        ("mtp.pre_fc_norm_hidden.weight", (900_000,), 0.0, 0.1),
        (f"{L}linear_attn.norm.weight", (900_000,), 1.0, 0.1),
        (f"{V}blocks.0.norm2.weight", (900_000,), 1.0, 0.1),
        (f"{V}merger.norm.weight", (900_000,), 1.0, 0.1),
    ],
)
def test_values_have_the_recipe_s_distributions(
    name: str, shape: tuple[int, ...], mean: float, deviation: float
) -> None:
    """Mean and deviation of a normal distribution within five standard errors."""
    values = block(Tensor(name, "F32", shape, 0))
    error = deviation / len(values) ** 0.5
    assert abs(values.mean().item() - mean) < 5 * error
    assert abs(values.std().item() - deviation) < 5 * error


def test_a_is_uniform_and_kept_as_its_logarithm() -> None:
    values = block(Tensor(f"{L}linear_attn.A_log", "F32", (900_000,), 0)).exp()
    assert 0.0099 < values.min() < 0.011
    assert 15.99 < values.max() < 16.001
    error = (16 - 0.01) / 12**0.5 / len(values) ** 0.5
    assert abs(values.mean().item() - (0.01 + 16) / 2) < 5 * error


def test_the_tiny_checkpoint_s_tensors_are_the_recipe_s(tiny_checkpoint: Path) -> None:
    name = "model.language_model.layers.3.self_attn.q_proj.weight"
    tensors = {n: t for shard in SHARDS for n, t in load_file(tiny_checkpoint / "base" / shard).items()}
    tensor = tensors[name]
    expected = torch.frombuffer(
        bytearray(block_bytes(Tensor(name, "BF16", tuple(tensor.shape), 0), 0, 0)), dtype=torch.bfloat16
    )
    assert torch.equal(tensor.flatten(), expected)


def block(tensor: Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(block_bytes(tensor, 0, 0)), dtype=torch.float32).double()


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
