"""Verification finds every wrong file by its name, size and bytes, before and after the load, and lists all of them."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoint import load_pin, open_checkpoint, verify_checkpoint
from engine.checkpoint.export import export_checkpoint
from engine.errors import CheckpointError
from tests.checkpoint.breaking import (
    ADAPTER,
    EXPORT,
    FILES,
    SHARD,
    flip,
    mismatches,
    verify,
)
from tests.checkpoints import repin, rewrite


def test_a_whole_checkpoint_verifies_under_its_own_name(mini_checkpoint: Path) -> None:
    verified = verify(mini_checkpoint)
    pin = load_pin(mini_checkpoint / "pin.json")
    assert verified.identity.name == f"mini@{pin.sha256[:12]}"
    assert verified.identity.hashes["pin_sha256"] == pin.sha256
    assert {str(path.relative_to(mini_checkpoint)) for path in verified.stamps} == set(FILES)
    verified.recheck()


def test_the_tiny_checkpoint_with_the_real_tokenizer_verifies(tiny_checkpoint: Path) -> None:
    assert verify(tiny_checkpoint).config.image_token_id == 248_056


# Bytes.


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("at", [0, -1], ids=["first byte", "last byte"])
def test_one_flipped_byte_is_named_with_both_hashes(name: str, at: int, checkpoint: Path) -> None:
    flip(checkpoint / name, at)
    (found,) = mismatches(checkpoint)
    assert found.startswith(f"{name}: SHA-256 ")
    assert ", expected " in found


def test_every_byte_of_the_manifest_counts(checkpoint: Path) -> None:
    path = checkpoint / "export/manifest.json"
    content = path.read_bytes()
    for at in range(0, len(content), 37):
        rewrite(path, content)
        flip(path, at)
        assert all("export/" in found for found in mismatches(checkpoint)), content[at - 20 : at + 20]


@pytest.mark.parametrize("kept", [0, 5, -1])
def test_a_truncated_shard_is_named_with_both_sizes(kept: int, checkpoint: Path) -> None:
    content = (checkpoint / SHARD).read_bytes()
    rewrite(checkpoint / SHARD, content[:kept])
    (found,) = mismatches(checkpoint)
    assert found == f"{SHARD}: size {len(content[:kept])}, expected {len(content)} bytes"


def test_a_longer_file_is_named(checkpoint: Path) -> None:
    content = (checkpoint / SHARD).read_bytes()
    rewrite(checkpoint / SHARD, content + b"\0")
    assert mismatches(checkpoint) == (f"{SHARD}: size {len(content) + 1}, expected {len(content)} bytes",)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    assert any(found.startswith(f"{name}: not found") for found in mismatches(checkpoint))


def test_all_mismatches_are_listed(checkpoint: Path) -> None:
    flip(checkpoint / "base/config.json", 5)
    flip(checkpoint / ADAPTER, 5)
    flip(checkpoint / EXPORT, 5)
    (checkpoint / "base/extra.bin").write_bytes(b"")
    (checkpoint / "base/tokenizer.json").unlink()
    places = {found.partition(":")[0] for found in mismatches(checkpoint)}
    assert places == {"base/config.json", ADAPTER, EXPORT, "base/extra.bin", "base/tokenizer.json"}


# Names.


@pytest.mark.parametrize(
    "name",
    [
        "base/model.safetensors",
        "base/pytorch_model.bin",
        "base/.hidden",
        "base/sub/model.safetensors",
        "base/.cache/model.safetensors",
        "adapter/adapter_model.safetensors",
        "adapter/multimodal/adapter_model.bin",
        "adapter/text/adapter_config.json",
        "export/model-00001-of-00001.safetensors",
        "export/sub/manifest.json",
    ],
)
def test_a_file_that_is_not_listed_is_refused(name: str, checkpoint: Path) -> None:
    (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
    (checkpoint / name).write_bytes(b"x")
    assert mismatches(checkpoint) == (f"{name}: found a file that is not listed; remove it",)


def test_an_empty_folder_is_refused(checkpoint: Path) -> None:
    (checkpoint / "base/sub").mkdir()
    (found,) = mismatches(checkpoint)
    assert found.startswith("base/sub: found an empty folder")


@pytest.mark.parametrize("name", [SHARD, ADAPTER, EXPORT])
def test_a_link_out_of_the_folder_is_refused_though_its_target_is_right(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.move(checkpoint / name, tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    assert any(found.startswith(f"{name}: found a link") for found in mismatches(checkpoint))


def test_a_folder_that_is_a_link_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shutil.move(checkpoint / "adapter/multimodal", tmp_path / "elsewhere")
    (checkpoint / "adapter/multimodal").symlink_to(tmp_path / "elsewhere")
    assert any(found.startswith("adapter/multimodal: found a link") for found in mismatches(checkpoint))


def test_a_pipe_in_a_file_s_place_is_refused_and_not_waited_for(checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    os.mkfifo(checkpoint / SHARD)
    assert any(found.startswith(f"{SHARD}: found a device, pipe") for found in mismatches(checkpoint))


def test_what_the_downloader_keeps_is_let_be(checkpoint: Path) -> None:
    for folder in ("base", "adapter"):
        kept = checkpoint / folder / ".cache/huggingface/download"
        kept.mkdir(parents=True)
        (kept / "config.json.metadata").write_text("851bf6e")
        (kept.parent / ".gitignore").write_text("*")
    verify(checkpoint)


def test_optional_files_may_be_absent_but_not_other_ones(checkpoint: Path) -> None:
    readme = checkpoint / "adapter/README.md"
    readme.write_text("about")
    pin = repin(checkpoint)
    files = dict(pin.adapter.files)
    files["README.md"] = dataclasses.replace(files["README.md"], optional=True)
    own = dataclasses.replace(pin, adapter=dataclasses.replace(pin.adapter, files=files))
    own.write(checkpoint / "pin.json")
    (checkpoint / "export").rename(checkpoint / "old")
    export_checkpoint(checkpoint / "base", checkpoint / "adapter", checkpoint / "export", own)
    verify(checkpoint)
    readme.unlink()
    verify(checkpoint)
    readme.write_text("other")
    (found,) = mismatches(checkpoint)
    assert found.startswith("adapter/README.md: SHA-256")


def test_missing_folders_are_all_named_with_what_makes_them(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tmp_path / "nowhere")
    assert [found.rpartition("/")[2].partition(":")[0] for found in refused.value.mismatches[:2]] == ["base", "adapter"]
    assert "python -m worker export" in refused.value.mismatches[2]


# Between check and load.


def own(path: Path) -> None:
    """Make the file the copy's own, so that writing into it changes no other."""
    rewrite(path, path.read_bytes())


def keep_time(path: Path, change: Callable[[], object]) -> None:
    """Change a file and hide the time of it."""
    times = path.stat()
    change()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def swap(path: Path) -> None:
    """The same bytes and time in another file."""
    spare = path.with_name("spare")  # kept until the new file is there, so that it cannot get the old one's inode
    path.rename(spare)
    spare_times = spare.stat()
    path.write_bytes(spare.read_bytes())
    os.utime(path, ns=(spare_times.st_atime_ns, spare_times.st_mtime_ns))
    spare.unlink()


def write_into(path: Path) -> None:
    """Other bytes in the same file, as many as before."""
    times = path.stat()
    with path.open("r+b") as file:
        file.write(b"#")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def grow(path: Path) -> None:
    """The same file and time, a byte more."""

    def append() -> None:
        with path.open("ab") as file:
            file.write(b"#")

    keep_time(path, append)


@pytest.mark.parametrize("name", [SHARD, ADAPTER, EXPORT, "base/tokenizer.json"])
@pytest.mark.parametrize("change", [swap, write_into, grow, Path.unlink])
def test_a_file_changed_after_it_was_verified_is_noticed(
    name: str, change: Callable[[Path], None], checkpoint: Path
) -> None:
    own(checkpoint / name)
    verified = verify(checkpoint)
    verified.recheck()
    change(checkpoint / name)
    with pytest.raises(CheckpointError) as refused:
        verified.recheck()
    (found,) = refused.value.mismatches
    assert Path(name).name in found
    assert "was changed after it was verified" in found


def test_progress_is_told_in_bytes_up_to_the_end(mini_checkpoint: Path) -> None:
    told: list[tuple[str, int, int]] = []
    verify_checkpoint(open_checkpoint(mini_checkpoint), lambda *call: told.append(call))
    total = sum((mini_checkpoint / name).stat().st_size for name in FILES)
    assert told[-1] == ("verify", total, total)
    assert all(done <= total for _, done, _ in told)
    assert sum(done == total for _, done, _ in told) == 1
