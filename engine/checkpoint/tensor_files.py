"""Safetensors files by their header: reading it strictly, planning one, taking a tensor's bytes out.

The format (huggingface/safetensors): 8 bytes little-endian header length, a JSON header padded with blanks, then the
tensors' bytes end to end. It knows no names of any model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from engine.checkpoint.strict_json import parse_object
from engine.errors import CheckpointError

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
# The limit of the format's own reader.
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: its bytes are `[start, start + size_bytes)` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        """How many values."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all values."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Where the next tensor begins."""
        return self.start + self.size_bytes


@dataclass(frozen=True)
class FilePlan:
    """A safetensors file before it is written: the bytes before the first tensor, then the tensors in file order."""

    header: bytes
    tensors: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return self.tensors[-1].end if self.tensors else len(self.header)


def plan_file(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> FilePlan:
    """Lay out `(name, dtype, shape)` as the format's own writer does: wide dtypes first, then by name."""
    ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor[1]], tensor[0]))
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    offset = 0
    placed = []
    for name, dtype, shape in ordered:
        tensor = Tensor(name, dtype, shape, offset)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, tensor.end]}
        offset = tensor.end
        placed.append(tensor)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return FilePlan(head, tuple(Tensor(t.name, t.dtype, t.shape, t.start + len(head)) for t in placed))


def read_header(file: BinaryIO, name: str) -> dict[str, Tensor]:
    """The tensors of an open safetensors file, by name, in file order; `name` is how errors call the file.

    Raises:
        CheckpointError: the header is not what the format says, or its tensors do not fill the file exactly.
    """
    size_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(os.pread(file.fileno(), _LENGTH_BYTES, 0), "little")
    if size_bytes < _LENGTH_BYTES or header_bytes > min(size_bytes - _LENGTH_BYTES, MAX_HEADER_BYTES):
        raise CheckpointError(
            [f"{name}: not a safetensors file (a header of {header_bytes} bytes in a file of {size_bytes})"]
        )
    raw = parse_object(os.pread(file.fileno(), header_bytes, _LENGTH_BYTES), f"{name} (header)")
    raw.pop(_METADATA, None)
    tensors = [_entry(key, value, _LENGTH_BYTES + header_bytes, name) for key, value in raw.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    end = _LENGTH_BYTES + header_bytes
    for tensor in tensors:
        if tensor.start != end:
            raise CheckpointError([f"{name}: {tensor.name} begins at byte {tensor.start}, {end} was expected"])
        end = tensor.end
    if end != size_bytes:
        raise CheckpointError([f"{name}: its tensors end at byte {end}, the file at {size_bytes}"])
    return {tensor.name: tensor for tensor in tensors}


def read_bytes(file: BinaryIO, tensor: Tensor) -> bytearray:
    """All of a tensor's bytes.

    Raises:
        CheckpointError: the file ends before the tensor.
    """
    buffer = bytearray(tensor.size_bytes)
    filled = 0
    for piece in read_pieces(file, tensor, max(tensor.size_bytes, 1)):
        buffer[filled : filled + len(piece)] = piece
        filled += len(piece)
    return buffer


def read_pieces(file: BinaryIO, tensor: Tensor, piece_bytes: int) -> Iterator[bytes]:
    """A tensor's bytes, at most `piece_bytes` at a time.

    Raises:
        CheckpointError: the file ends before the tensor.
    """
    at = tensor.start
    while at < tensor.end:
        piece = os.pread(file.fileno(), min(piece_bytes, tensor.end - at), at)
        if not piece:
            raise CheckpointError([f"{tensor.name}: the file ends inside it, at byte {at} of {tensor.end}"])
        at += len(piece)
        yield piece


def _entry(key: str, value: object, data_start: int, name: str) -> Tensor:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if (
            dtype in DTYPE_BYTES and all(type(side) is int and side >= 0 for side in shape) and start >= 0
        ):
            tensor = Tensor(key, dtype, tuple(shape), data_start + start)
            if tensor.size_bytes == end - start:
                return tensor
    raise CheckpointError([f"{name}: the header's entry for {key!r} does not hold together: {value!r}"])
