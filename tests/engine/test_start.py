"""Verification beside loading: one wrong file and there is no engine, however the two interleave."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engine import CheckpointError, Engine, open_checkpoint
from engine.start import verify_and_load
from tests.checkpoints import rewrite

CPU = torch.device("cpu")


def test_phases_end_in_order_and_whole(checkpoint: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    verify_and_load(open_checkpoint(checkpoint), CPU, torch.bfloat16, lambda *told: seen.append(told))
    phases = [phase for phase, _, _ in seen]
    assert phases == sorted(phases, key=["verify", "load"].index)
    ends = {phase: (done, total) for phase, done, total in seen}
    assert ends.keys() == {"verify", "load"} and all(done == total for done, total in ends.values())


def test_what_verification_found_comes_before_what_loading_met(checkpoint: Path) -> None:
    shard = next((checkpoint / "base").glob("*00001*.safetensors"))
    rewrite(shard, shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"size \d+, expected \d+ bytes"):
        Engine.load(open_checkpoint(checkpoint), device="cpu")


def test_a_file_swapped_for_the_pinned_one_while_it_was_loaded_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    # The loader may read a changed adapter; the pinned one is put back before its turn to be hashed comes.
    adapter = checkpoint / "adapter/multimodal/adapter_model.safetensors"
    pinned = tmp_path / "pinned"
    shutil.copy2(adapter, pinned)
    changed = bytearray(adapter.read_bytes())
    changed[-1] ^= 1
    rewrite(adapter, bytes(changed))
    paths = open_checkpoint(checkpoint)
    swapped: list[str] = []

    class SwapsOnFirstLook(type(paths)):  # type: ignore[misc]
        def pin(self) -> object:
            swapped.append("now")
            pinned.replace(adapter)  # at once: the loader meets the one or the other
            return paths.pin()

    racing = SwapsOnFirstLook(paths.base, paths.adapter, paths.export, paths.pin_file)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: was swapped while it was loaded"):
        verify_and_load(racing, CPU, torch.bfloat16)
    assert swapped
