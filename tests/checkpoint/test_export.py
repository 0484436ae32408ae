"""The export: PEFT's merge to the last bit, everything else copied, there whole or not at all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint import export as export_module
from engine.checkpoint import load_pin, open_checkpoint, verify_checkpoint
from engine.checkpoint.export import export_checkpoint, merge_lora
from engine.errors import CheckpointError
from tests.checkpoints import rewrite

SCALE = 2.0


def export_again(root: Path, out: Path) -> None:
    export_checkpoint(root / "base", root / "adapter", out, load_pin(root / "pin.json"))


def base_tensors(root: Path) -> dict[str, torch.Tensor]:
    return {name: t for shard in (root / "base").glob("*.safetensors") for name, t in load_file(shard).items()}


def test_the_merge_is_peft_s_to_the_last_bit(tiny_checkpoint: Path) -> None:
    """Transformers loads the synthetic base, PEFT the synthetic adapter: their merged weights are the export's."""
    from peft import PeftModel
    from transformers import Qwen3_5ForConditionalGeneration

    model = Qwen3_5ForConditionalGeneration.from_pretrained(tiny_checkpoint / "base", dtype=torch.bfloat16)
    adapted = PeftModel.from_pretrained(model, str(tiny_checkpoint / "adapter/multimodal"))
    merged = adapted.merge_and_unload().state_dict()
    exported = load_file(tiny_checkpoint / "export/model.safetensors")
    language = {name: tensor for name, tensor in merged.items() if name.startswith("model.language_model.")}
    assert language.keys() == exported.keys()
    # Transformers holds the two float32 tensors of a layer in the model's dtype.
    different = [name for name in exported if not torch.equal(exported[name].to(torch.bfloat16), language[name])]
    assert different == []


def peft_merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What PEFT makes of one linear layer."""
    from peft import LoraConfig, get_peft_model

    outputs, inputs = weight.shape
    layer = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16))
    layer[0].weight.data = weight.clone()
    adapted: Any = get_peft_model(layer, LoraConfig(r=16, lora_alpha=32, target_modules=["0"]))
    pair = adapted.base_model.model[0]
    pair.lora_A["default"].weight.data = a
    pair.lora_B["default"].weight.data = b
    merged: torch.Tensor = adapted.merge_and_unload()[0].weight.data
    return merged


@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 2560), (2560, 1024), (77, 300), (1, 5), (300, 1)])
def test_one_merge_is_peft_s_whatever_the_shape(outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).mul(inputs**-0.5).to(torch.bfloat16)
    a = torch.randn(16, inputs, generator=generator) * inputs**-0.5
    b = torch.randn(outputs, 16, generator=generator) * 0.02
    merged = merge_lora(weight, a, b, SCALE)
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, peft_merge(weight, a, b))
    assert not torch.equal(merged, weight)


def test_a_merge_is_rounded_once() -> None:
    """The sum is formed in float32: a product that BF16 would round away before the addition still counts."""
    weight = torch.tensor([[1.0]], dtype=torch.bfloat16)
    a, b = torch.tensor([[1.0]]), torch.tensor([[2.0**-9 + 2.0**-19]])
    # 1 + 2 * (2^-9 + 2^-19) lies just over the middle between 1 and the next BF16 number, 1 + 2^-7.
    assert merge_lora(weight, a, b, SCALE).item() == 1 + 2.0**-7


def test_what_has_no_pair_is_copied_and_what_has_one_is_changed(mini_checkpoint: Path) -> None:
    base, exported = base_tensors(mini_checkpoint), load_file(mini_checkpoint / "export/model.safetensors")
    assert all(name.startswith("model.language_model.") for name in exported)
    merged = {name for name, tensor in exported.items() if not torch.equal(tensor, base[name])}
    targets = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert merged == {name for name in exported if name.split(".")[-2] in targets}
    assert {name: tensor.dtype for name, tensor in exported.items()} == {n: base[n].dtype for n in exported}


def test_an_export_is_the_same_bytes_every_time(checkpoint: Path, tmp_path: Path) -> None:
    export_again(checkpoint, tmp_path / "again")
    for path in (checkpoint / "export").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_large_exports_come_in_shards_that_verify(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_file(checkpoint / "export/model.safetensors")
    monkeypatch.setattr(export_module, "MAX_SHARD_BYTES", 200_000)
    (checkpoint / "export").rename(checkpoint / "old")
    export_again(checkpoint, checkpoint / "export")
    shards = sorted((checkpoint / "export").glob("*.safetensors"))
    assert len(shards) >= 3
    assert all(shard.stat().st_size < 210_000 for shard in shards)
    parts = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    verify_checkpoint(open_checkpoint(checkpoint))


def test_the_manifest_names_sources_and_every_file(mini_checkpoint: Path) -> None:
    manifest = json.loads((mini_checkpoint / "export/manifest.json").read_bytes())
    pin = load_pin(mini_checkpoint / "pin.json")
    assert manifest["pin"] == {"name": "mini", "sha256": pin.sha256}
    assert manifest["base"]["revision"] == "seed-0"
    assert manifest["base"]["files"]["config.json"]["sha256"] == pin.base.files["config.json"].sha256
    files = {path.name for path in (mini_checkpoint / "export").iterdir()} - {"manifest.json"}
    assert (
        set(manifest["files"])
        == files
        == {
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }
    )


def test_a_source_that_is_not_as_pinned_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "adapter/multimodal/adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    rewrite(path, bytes(content))
    with pytest.raises(CheckpointError, match=r"adapter/multimodal/adapter_model\.safetensors: SHA-256"):
        export_again(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_source_swapped_during_the_export_is_noticed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint / "base/model.safetensors-00002-of-00002.safetensors"
    write_shards = export_module._write_shards

    def swap_and_write(*arguments: object) -> object:
        rewrite(path, path.read_bytes())
        return write_shards(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(export_module, "_write_shards", swap_and_write)
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors: was changed after it was verified"):
        export_again(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_overwritten(checkpoint: Path) -> None:
    before = (checkpoint / "export/manifest.json").stat()
    with pytest.raises(FileExistsError, match="is there already"):
        export_again(checkpoint, checkpoint / "export")
    assert (checkpoint / "export/manifest.json").stat() == before


STALLED_EXPORT = """
import sys, time
from pathlib import Path
from engine.checkpoint import export, load_pin
root = Path(sys.argv[1])
stage = sys.argv[2]
real = getattr(export, stage)
def stall(*arguments, **keywords):
    if stage == "_write_small_files":
        real(*arguments, **keywords)
    print("stalled", flush=True)
    time.sleep(60)
setattr(export, stage, stall)
export.export_checkpoint(root / "base", root / "adapter", root / "export", load_pin(root / "pin.json"))
"""


@pytest.mark.parametrize("stage", ["_write_shard", "_write_small_files"])
def test_a_killed_export_leaves_nothing_that_verifies_and_the_next_one_clears_it(stage: str, checkpoint: Path) -> None:
    for path in (checkpoint / "export").iterdir():
        path.unlink()
    (checkpoint / "export").rmdir()
    command = [sys.executable, "-c", STALLED_EXPORT, str(checkpoint), stage]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stalled\n"
        with pytest.raises(FileExistsError, match="by another process"):
            export_again(checkpoint, checkpoint / "export")
        process.send_signal(signal.SIGKILL)
    left = checkpoint / ".export.partial"
    assert left.is_dir()
    with pytest.raises(CheckpointError, match="export: no such folder"):
        open_checkpoint(checkpoint)
    left.rename(checkpoint / "export")
    with pytest.raises(CheckpointError, match=r"export/manifest.json: cannot be read .* unfinished"):
        verify_checkpoint(open_checkpoint(checkpoint))
    (checkpoint / "export").rename(left)
    export_again(checkpoint, checkpoint / "export")
    verify_checkpoint(open_checkpoint(checkpoint))
    assert not left.exists()


def test_progress_is_told_in_bytes_up_to_the_end(checkpoint: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    pin = load_pin(checkpoint / "pin.json")
    export_checkpoint(checkpoint / "base", checkpoint / "adapter", tmp_path / "out", pin, lambda *t: told.append(t))
    assert list(dict.fromkeys(phase for phase, _, _ in told)) == ["verify", "export"]
    for phase in ("verify", "export"):
        calls = [(done, total) for name, done, total in told if name == phase]
        assert calls[-1][0] == calls[-1][1] > 0
        assert sorted(calls) == calls
    assert told[-1][2] == (tmp_path / "out/model.safetensors").stat().st_size
