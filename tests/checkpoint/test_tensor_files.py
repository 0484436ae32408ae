"""Safetensors headers: planned as the format's own writer writes them, read strictly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from engine.checkpoint.tensor_files import Tensor, plan_file, read_bytes, read_header, read_pieces
from engine.errors import CheckpointError

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3).to(torch.bfloat16),
    "a.weight": torch.arange(5, dtype=torch.float32).to(torch.bfloat16),
    "z.wide": torch.arange(4, dtype=torch.float32),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(1.5),
}
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def write(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def read(path: Path) -> dict[str, Tensor]:
    with path.open("rb", buffering=0) as file:
        return read_header(file, path.name)


def test_a_plan_is_what_the_format_s_own_writer_writes() -> None:
    plan = plan_file((name, NAMES[t.dtype], tuple(t.shape)) for name, t in reversed(TENSORS.items()))
    written = save(TENSORS, metadata={"format": "pt"})
    assert written.startswith(plan.header)
    assert len(written) == plan.size_bytes


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(save(TENSORS))
    found = read(path)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (NAMES[t.dtype], tuple(t.shape)) for name, t in TENSORS.items()
    }
    with path.open("rb", buffering=0) as file:
        for name, tensor in TENSORS.items():
            data = tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            assert read_bytes(file, found[name]) == data
            assert b"".join(read_pieces(file, found[name], 3)) == data


def entry(start: int, end: int, **changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]} | changes


@pytest.mark.parametrize(
    ("header", "data", "fault"),
    [
        ({"a": entry(0, 4)}, 8, "its tensors end at byte"),
        ({"a": entry(0, 8)}, 4, "its tensors end at byte"),
        ({"a": entry(4, 8)}, 8, "a begins at byte"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "b begins at byte"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "b begins at byte"),
        ({"a": entry(0, 4, shape=[2])}, 4, "entry for 'a' does not hold together"),
        ({"a": entry(0, 4, shape=[-1])}, 4, "entry for 'a' does not hold together"),
        ({"a": entry(0, 4, shape=[True])}, 4, "entry for 'a' does not hold together"),
        ({"a": entry(0, 4, shape="1")}, 4, "entry for 'a' does not hold together"),
        ({"a": entry(0, 4, dtype="F8")}, 4, "entry for 'a' does not hold together"),
        ({"a": entry(0, 4, data_offsets=[-4, 0])}, 4, "entry for 'a' does not hold together"),
        ({"a": 5}, 4, "entry for 'a' does not hold together"),
        (b'{"a":1,"a":2}', 0, "'a' stands twice"),
        (b"{", 0, "not readable as JSON"),
        (b"[]", 0, "a JSON object is needed"),
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(
    header: object, data: int, fault: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=fault):
        read(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 8, (1000).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_too_short_for_its_header_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read(path)


def test_a_file_that_ends_inside_a_tensor_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.safetensors", {"a": entry(0, 400)}, bytes(400))
    tensor = read(path)["a"]
    path.write_bytes(path.read_bytes()[:-1])
    with path.open("rb", buffering=0) as file, pytest.raises(CheckpointError, match="the file ends inside it"):
        read_bytes(file, tensor)
