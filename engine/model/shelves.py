"""Safetensors files as shelves of named tensors: what is there, what is needed, and taking each once.

It knows files and names, and nothing of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.paths import WEIGHTS_INDEX

SINGLE_NAME = "model.safetensors"

_ITEM_BYTES = {"F32": 4, "BF16": 2}


class Take(Protocol):
    """Take a tensor by its name; its shape is what the model needs it to be."""

    def __call__(self, name: str, *shape: int) -> torch.Tensor: ...


class Header(NamedTuple):
    """Where a tensor lies and what it is, as its file's header says. `dtype` is safetensors' name, such as `BF16`."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 0)


def read_folder(folder: Path, faults: list[str]) -> dict[str, Header]:
    """The headers of a folder's tensors: of the shards that its index names, or of its single file.

    What cannot be read, and what index and shards say of each other wrongly, goes to `faults`.
    """
    index = folder / WEIGHTS_INDEX
    if not index.exists():
        return read_files([folder / SINGLE_NAME], faults)
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        # A shard is a file of this folder: a name with a path in it is not followed.
        places = {str(name): Path(str(shard)).name for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        faults.append(f"{_label(index)}: not a readable index of shards ({error!r})")
        return {}
    headers = read_files([folder / shard for shard in sorted(set(places.values()))], faults)
    for name in sorted(places.keys() | headers.keys()):
        found = headers[name].file.name if name in headers else "no shard"
        named = places.get(name, "no shard")
        if found != named:
            faults.append(f"{_label(index)}: {name} is in {found}, the index names {named}")
    return headers


def read_files(files: Iterable[Path], faults: list[str]) -> dict[str, Header]:
    """The headers of the tensors of some files; what cannot be read or stands twice goes to `faults`."""
    headers: dict[str, Header] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a mapping)
                    part = opened.get_slice(name)
                    if name in headers:
                        faults.append(f"{_label(file)}: {name} is also in {headers[name].file.name}")
                    headers[name] = Header(file, tuple(part.get_shape()), str(part.get_dtype()))
        except (OSError, SafetensorError) as error:
            faults.append(f"{_label(file)}: not a readable safetensors file ({error})")
    return headers


def compare(
    source: str,
    needed: Mapping[str, tuple[int, ...]],
    headers: Mapping[str, Header],
    unused: tuple[str, ...],
    dtypes: set[str],
) -> list[str]:
    """Every difference between what is needed and what is there.

    Args:
        source: what to call the place where a missing tensor should be.
        needed: the tensors' shapes, by name.
        headers: what is there.
        unused: beginnings of names that may be there and are not needed.
        dtypes: the dtypes, by safetensors' names, that may be loaded.
    """
    faults = [f"{source}: {name} {shape} is missing" for name, shape in needed.items() if name not in headers]
    for name, header in headers.items():
        where = f"{_label(header.file)}: {name}"
        if name not in needed:
            if not name.startswith(unused):
                faults.append(f"{where} {header.shape} is left over: the model has no place for it")
            continue
        if header.shape != needed[name]:
            faults.append(f"{where} has shape {header.shape}, {needed[name]} is needed")
        if header.dtype not in dtypes:
            faults.append(f"{where} is {header.dtype}, {' or '.join(sorted(dtypes))} is needed")
    return faults


class Plan:
    """A shelf that only notes what is taken from it, and hands out tensors without data (device `meta`)."""

    def __init__(self) -> None:
        self.needed: dict[str, tuple[int, ...]] = {}

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        assert name not in self.needed, f"{name} is taken twice"
        self.needed[name] = shape
        return torch.empty(shape, device="meta")


class Shelf:
    """The files' tensors, each taken from its file straight to `device` in `dtype`; a context manager.

    `taken` is told of each tensor's bytes in its file.
    """

    def __init__(
        self, headers: Mapping[str, Header], device: torch.device, dtype: torch.dtype, taken: Callable[[int], None]
    ) -> None:
        self._headers, self._device, self._dtype, self._taken = headers, device, dtype, taken
        self._stack = ExitStack()
        self._opened: dict[Path, safe_open] = {}

    def __enter__(self) -> Shelf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        header = self._headers[name]
        if header.file not in self._opened:
            self._opened[header.file] = self._stack.enter_context(safe_open(header.file, framework="pt"))
        stored: torch.Tensor = self._opened[header.file].get_tensor(name)  # type: ignore[no-untyped-call]
        assert stored.shape == shape, (name, stored.shape, shape)
        self._taken(header.size_bytes)
        # A copy in every case: what was read is a view of the mapped file, which must not be able to change the model.
        return stored.to(device=self._device, dtype=self._dtype, copy=True)


def _label(path: Path) -> str:
    """A path as faults name it: the file and its folder."""
    return f"{path.parent.name}/{path.name}"
