"""Loading: every tensor of the published layout once, nothing missing, nothing left over, all faults at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import CheckpointError
from engine.model import load_model
from tests.engine import model_cases as cases
from tests.engine import reference as hf


@pytest.fixture
def paths() -> Iterator[hf.TinyCheckpoint]:
    """A fresh checkpoint that a test may spoil."""
    with cases.checkpoint("plain") as fresh:
        yield fresh


def adapter_file(paths: hf.TinyCheckpoint) -> Path:
    return paths.adapter / "multimodal" / hf.ADAPTER_FILE


def export_file(paths: hf.TinyCheckpoint) -> Path:
    return paths.export / hf.EXPORT_FILE


def index_file(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def faults(paths: hf.TinyCheckpoint) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        cases.load(paths)
    return caught.value.mismatches


def tensors(part: object) -> list[torch.Tensor]:
    """Every tensor of the model, or of a part of it, in a fixed order."""
    if isinstance(part, torch.Tensor):
        return [part]
    if is_dataclass(part):
        part = [getattr(part, field.name) for field in fields(part)]
    return [tensor for inner in part for tensor in tensors(inner)] if isinstance(part, tuple | list) else []


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_only_lora_and_frequencies_are_always_float32(dtype: torch.dtype, paths: hf.TinyCheckpoint) -> None:
    vision, language = cases.load(paths, dtype)[1:]
    adapted = [
        *(layer for block in vision.blocks for layer in (block.fc1, block.fc2)),
        vision.merger.fc1,
        vision.merger.fc2,
    ]
    pairs = [tensor for layer in adapted for tensor in tensors(layer.lora)]
    always_wide = {id(tensor) for tensor in (*pairs, vision.frequencies, language.frequencies)}
    assert len(always_wide) == 2 * (2 * 2 + 2) + 2
    for tensor in tensors((vision, language)):
        assert tensor.dtype == (torch.float32 if id(tensor) in always_wide else dtype)


def test_no_tensor_depends_on_the_files_afterwards(paths: hf.TinyCheckpoint) -> None:
    model = cases.load(paths)
    before = [tensor.clone() for tensor in tensors(model)]
    for file in (adapter_file(paths), export_file(paths), *paths.base.glob("*.safetensors")):
        with file.open("r+b") as opened:  # in place: a mapping of the file would see it
            opened.write(b"\xff" * file.stat().st_size)
    assert all(torch.equal(old, new) for old, new in zip(before, tensors(model), strict=True))


def test_bytes_are_reported_up_to_their_total(paths: hf.TinyCheckpoint) -> None:
    seen: list[tuple[str, int, int]] = []
    load_model(paths.base, paths.adapter, paths.export, device="cpu", report=lambda *progress: seen.append(progress))
    done = [done_bytes for _, done_bytes, _ in seen]
    assert done == sorted(done) and len({(phase, total) for phase, _, total in seen}) == 1
    assert done[-1] == seen[-1][2] > export_file(paths).stat().st_size * 0.9


def test_an_export_in_shards(paths: hf.TinyCheckpoint) -> None:
    whole = hf.read_tensors(export_file(paths))
    export_file(paths).unlink()
    names = sorted(whole)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: whole[name] for name in part}, paths.export / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    index_file(paths.export).write_text(json.dumps({"weight_map": weight_map}))
    found = tensors(cases.load(paths))
    assert all(torch.equal(one, other) for one, other in zip(found, tensors(cases.model("plain")), strict=True))


def test_the_unused_parts_of_base_and_adapter_may_be_missing(paths: hf.TinyCheckpoint) -> None:
    shards = {file: hf.read_tensors(file) for file in paths.base.glob("*.safetensors")}
    weight_map = {}
    for file, held in shards.items():
        kept = {name: tensor for name, tensor in held.items() if name.startswith("model.visual.")}
        save_file(kept, file)
        weight_map |= dict.fromkeys(kept, file.name)
    index_file(paths.base).write_text(json.dumps({"weight_map": weight_map}))
    adapter = hf.read_tensors(adapter_file(paths))
    hf.edit_tensors(adapter_file(paths), dict.fromkeys(name for name in adapter if "language_model" in name))
    cases.load(paths)


@pytest.mark.parametrize(
    "part, name",
    [
        ("export", "model.language_model.layers.1.linear_attn.dt_bias"),
        ("export", "model.language_model.norm.weight"),
        ("adapter", "base_model.model.model.visual.merger.linear_fc1.lora_B.weight"),
    ],
)
def test_a_missing_tensor(part: str, name: str, paths: hf.TinyCheckpoint) -> None:
    hf.edit_tensors(export_file(paths) if part == "export" else adapter_file(paths), {name: None})
    (fault,) = faults(paths)
    assert fault.startswith(f"{part}: {name}") and "missing" in fault


@pytest.mark.parametrize(
    "part, name",
    [
        ("export", "model.language_model.layers.4.mlp.up_proj.weight"),
        ("export", "lm_head.weight"),
        ("export", "mtp.norm.weight"),
        ("adapter", "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"),
    ],
)
def test_a_tensor_left_over(part: str, name: str, paths: hf.TinyCheckpoint) -> None:
    hf.edit_tensors(export_file(paths) if part == "export" else adapter_file(paths), {name: torch.zeros(3, 5)})
    (fault,) = faults(paths)
    assert name in fault and "(3, 5)" in fault and "left over" in fault


def test_another_shape_or_dtype(paths: hf.TinyCheckpoint) -> None:
    norm, embedding = "model.language_model.norm.weight", "model.language_model.embed_tokens.weight"
    pair = "base_model.model.model.visual.merger.linear_fc1.lora_A.weight"
    hf.edit_tensors(export_file(paths), {norm: torch.zeros(65), embedding: torch.zeros(300, 64, dtype=torch.int8)})
    hf.edit_tensors(adapter_file(paths), {pair: torch.zeros(hf.RANK, 256, dtype=torch.bfloat16)})
    found = faults(paths)
    assert len(found) == 3
    assert any(norm in fault and "(65,)" in fault and "(64,)" in fault for fault in found)
    assert any(embedding in fault and "I8" in fault for fault in found)
    assert any(pair in fault and "BF16" in fault and "F32" in fault for fault in found)


def test_all_faults_of_all_files_at_once(paths: hf.TinyCheckpoint) -> None:
    hf.edit_tensors(export_file(paths), {"model.language_model.norm.weight": None, "stray": torch.zeros(1)})
    adapter = "base_model.model.model.visual.merger.linear_fc2.lora_A.weight"
    hf.edit_tensors(adapter_file(paths), {adapter: None})
    assert len(faults(paths)) == 3


@pytest.mark.parametrize("contents", (None, b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      trailing"))
def test_an_unreadable_file(contents: bytes | None, paths: hf.TinyCheckpoint) -> None:
    export_file(paths).unlink()
    if contents is not None:
        export_file(paths).write_bytes(contents)
    found = faults(paths)
    assert any(f"export/{hf.EXPORT_FILE}: not a readable safetensors file" in fault for fault in found)


@pytest.mark.parametrize("contents", ("{", "[]", '{"weight_map": []}', "{}"))
def test_an_unreadable_index(contents: str, paths: hf.TinyCheckpoint) -> None:
    index_file(paths.base).write_text(contents)
    assert any("not a readable index" in fault for fault in faults(paths))


def test_an_index_that_names_another_shard(paths: hf.TinyCheckpoint) -> None:
    index = json.loads(index_file(paths.base).read_text())
    shards = sorted(set(index["weight_map"].values()))
    for name, shard in index["weight_map"].items():
        if name.endswith("pos_embed.weight"):
            index["weight_map"][name] = shards[1 - shards.index(shard)]
    del index["weight_map"]["model.visual.merger.norm.bias"]
    index["weight_map"]["model.visual.unheard_of"] = shards[0]
    index_file(paths.base).write_text(json.dumps(index))
    found = faults(paths)
    for name in ("pos_embed.weight", "merger.norm.bias", "unheard_of"):
        assert any(name in fault and "the index names" in fault for fault in found)


def test_an_index_does_not_lead_out_of_its_folder(paths: hf.TinyCheckpoint) -> None:
    shard = next(paths.base.glob("*.safetensors"))
    outside = shard.rename(paths.base.parent / shard.name)
    index = json.loads(index_file(paths.base).read_text())
    moved = {name: f"../{file}" if file == shard.name else file for name, file in index["weight_map"].items()}
    index_file(paths.base).write_text(json.dumps({"weight_map": moved}))
    assert outside.exists()
    assert any(shard.name in fault and "not a readable safetensors file" in fault for fault in faults(paths))


def test_the_base_config_decides_the_sizes(paths: hf.TinyCheckpoint) -> None:
    config = hf.tiny_config(text={"num_hidden_layers": 8})
    (paths.base / "config.json").write_text(json.dumps(config))
    assert sum("layers.7.self_attn" in fault and "missing" in fault for fault in faults(paths)) == 6
