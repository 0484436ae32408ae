"""Pin files: the shipped one's facts, strict reading, and who may use which name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint import Pin, load_pin, published_pin
from engine.checkpoint.pins import PinnedFile, PinnedRepository, check_name
from engine.errors import CheckpointError

PUBLISHED_IDENTITY = "cua-ai/cua-s1-4b-0.2@16818868b0cc7813808aae4e87b417657046ab79:multimodal"
DIGEST = "ab" * 32


def own_pin(**changes: Any) -> Pin:
    base = PinnedRepository("own/base", "1", "", {"config.json": PinnedFile(10, DIGEST)})
    adapter = PinnedRepository("own/adapter", "1", "multimodal", {"multimodal/a.json": PinnedFile(10, DIGEST)})
    return dataclasses.replace(Pin("own", base, adapter, {}), **changes)


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_shipped_pin_is_the_published_checkpoint() -> None:
    pin = published_pin()
    assert pin.identity == PUBLISHED_IDENTITY
    assert pin.base.repository == "Qwen/Qwen3.5-4B"
    assert pin.base.revision == "851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a"
    assert pin.provenance["source_sha256"] == "9820bd232c5762f114e19680c0f8203d7e1faaf8a60c196cfe01964d6d8a6c09"
    assert len(pin.base.files) == 14
    shards = [file.size_bytes for name, file in pin.base.files.items() if name.endswith(".safetensors")]
    assert shards == [5_329_398_688, 3_990_429_408]
    tokenizer = pin.base.files["tokenizer.json"]
    assert tokenizer == PinnedFile(12_807_982, "5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42")
    weights = pin.adapter.files["multimodal/adapter_model.safetensors"]
    assert weights == PinnedFile(
        101_665_112, "38ecd5a9191a436c1739db29104517f0aff4c70d0736d9cd810d3d49cfd652ea", optional=False
    )
    required = {name for name, file in pin.adapter.files.items() if not file.optional}
    assert required == {"multimodal/adapter_config.json", "multimodal/adapter_model.safetensors"}


def test_a_copy_of_the_shipped_pin_is_the_shipped_pin_whatever_its_blanks(tmp_path: Path) -> None:
    content = published_pin().as_json()
    shuffled = dict(reversed(content.items()))
    assert load_pin(write(tmp_path / "pin.json", json.dumps(shuffled, indent=7))).identity == PUBLISHED_IDENTITY


def test_an_own_pin_comes_back_as_written_and_answers_under_its_name_and_hash(tmp_path: Path) -> None:
    pin = own_pin()
    pin.write(tmp_path / "pin.json")
    assert load_pin(tmp_path / "pin.json") == pin
    assert pin.identity == f"own@{pin.sha256[:12]}"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"provenance": {"source": "elsewhere"}},
        {"base": PinnedRepository("own/base", "2", "", {"config.json": PinnedFile(10, DIGEST)})},
        {"base": PinnedRepository("own/base", "1", "", {"config.json": PinnedFile(11, DIGEST)})},
        {"base": PinnedRepository("own/base", "1", "", {"config.json": PinnedFile(10, "ac" * 32)})},
        {"base": PinnedRepository("own/base", "1", "", {"config.json": PinnedFile(10, DIGEST, optional=True)})},
    ],
)
def test_another_value_is_another_identity(change: dict[str, object]) -> None:
    assert own_pin(**change).identity != own_pin().identity


PUBLISHED = published_pin()
ONE_BYTE_OFF = dataclasses.replace(
    PUBLISHED.base, files=dict(PUBLISHED.base.files) | {"config.json": PinnedFile(3161, DIGEST)}
)


@pytest.mark.parametrize(
    "pin",
    [
        own_pin(name="cua-s1-4b-0.2"),
        own_pin(name="CUA-S1-4B-0.2"),
        own_pin(adapter=PUBLISHED.adapter),
        own_pin(adapter=dataclasses.replace(PUBLISHED.adapter, repository="Cua-AI/cua-s1-4b-0.2", revision="2")),
        dataclasses.replace(PUBLISHED, base=ONE_BYTE_OFF),
        dataclasses.replace(PUBLISHED, provenance={}),
    ],
    ids=["name", "name in capitals", "repository", "another revision", "one hash off", "no provenance"],
)
def test_nobody_else_claims_the_published_name(pin: Pin, tmp_path: Path) -> None:
    pin.write(tmp_path / "pin.json")
    with pytest.raises(CheckpointError, match=r"claims .* of the published checkpoint"):
        load_pin(tmp_path / "pin.json")


def test_an_own_adapter_may_stand_on_the_published_base(tmp_path: Path) -> None:
    own_pin(base=PUBLISHED.base).write(tmp_path / "pin.json")
    assert load_pin(tmp_path / "pin.json").identity.startswith("own@")


@pytest.mark.parametrize(
    "name", ["", "a/b", "cua-ai/cua-s1-4b-0.2", ".hidden", "a b", "x" * 65, "naïve", "cua-s1-4b-0.2"]
)
def test_a_name_that_is_not_one_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError):
        check_name(name)


def broken(*path: str, value: object) -> dict[str, Any]:
    content: Any = json.loads(json.dumps(own_pin().as_json()))
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return dict(content)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (broken("extra", value=1), "pin.json: extra is not known"),
        (broken("base", "extra", value=1), "pin.json: base: extra is not known"),
        (broken("base", "files", "config.json", "md5", value=""), "config.json: md5 is not known"),
        (broken("version", value=2), "version must be 1, found 2"),
        (broken("version", value=True), "version must be 1, found True"),
        (broken("format", value="other"), "format must be 'cua-checkpoint-pin'"),
        (broken("base", value=[]), "base: an object is needed, found []"),
        (broken("base", "files", value={}), "files names no file"),
        (broken("base", "files", "config.json", "size_bytes", value=-1), "size_bytes must be an integer"),
        (broken("base", "files", "config.json", "size_bytes", value=1.0), "size_bytes must be an integer"),
        (broken("base", "files", "config.json", "sha256", value="AB" * 32), "sha256 must be 64 lower-case"),
        (broken("base", "files", "config.json", "optional", value="yes"), "optional must be true or false"),
        (broken("adapter", "folder", value="text"), "folder must be 'multimodal', found 'text'"),
        (broken("adapter", "revision", value=""), "revision must be a string"),
        (broken("provenance", value={"a": 1}), "provenance must hold strings"),
        ("{", "not readable as JSON"),
        ("[]", "a JSON object is needed"),
        ('{"name": "a", "name": "b"}', "'name' stands twice"),
        ('{"version": NaN}', "NaN is not allowed"),
    ],
)
def test_a_pin_is_read_strictly(content: object, fault: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        load_pin(write(tmp_path / "pin.json", content))
    assert any(fault in mismatch for mismatch in refused.value.mismatches), refused.value.mismatches


@pytest.mark.parametrize(
    "path",
    ["../x", "a/../x", "/etc/passwd", "a//b", "./a", "a/.", "", "a\\b", "a\nb", ".cache/huggingface/x", "..", "é"],
)
def test_a_path_stays_in_its_folder(path: str, tmp_path: Path) -> None:
    content = broken("base", "files", path, value={"size_bytes": 1, "sha256": DIGEST})
    with pytest.raises(CheckpointError, match="must stay inside"):
        load_pin(write(tmp_path / "pin.json", content))


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    content = broken("version", value=9) | {"format": "x", "extra": 1}
    with pytest.raises(CheckpointError) as refused:
        load_pin(write(tmp_path / "pin.json", content))
    assert len(refused.value.mismatches) == 3
