"""Where a checkpoint's parts lie: one folder with `base/`, `adapter/`, `export/` and, for a user's own, `pin.json`.

It also owns how a folder comes to be: written beside its place, then renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.pins import ADAPTER_FOLDER, Pin, load_pin, published_pin
from engine.errors import CheckpointError

CONFIG = "config.json"
PREPROCESSOR_CONFIG = "preprocessor_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = f"{ADAPTER_FOLDER}/adapter_config.json"
ADAPTER_WEIGHTS = f"{ADAPTER_FOLDER}/adapter_model.safetensors"
MANIFEST = "manifest.json"
PIN = "pin.json"


@dataclass(frozen=True)
class CheckpointPaths:
    """The folders of one checkpoint: two downloads (the adapter's holds `multimodal/`) and the export made from them.

    `pin_file` is None when the shipped pin of the published checkpoint holds.
    """

    base: Path
    adapter: Path
    export: Path
    pin_file: Path | None

    @property
    def config(self) -> Path:
        """The model's `config.json`."""
        return self.base / CONFIG

    @property
    def tokenizer(self) -> Path:
        """The `tokenizer.json`."""
        return self.base / TOKENIZER

    def pin(self) -> Pin:
        """The pin that this checkpoint is held against.

        Raises:
            CheckpointError: the checkpoint's own pin file is not in order.
        """
        return published_pin() if self.pin_file is None else load_pin(self.pin_file)


def open_checkpoint(root: Path) -> CheckpointPaths:
    """Find the parts of the checkpoint in `root`; nothing is read yet.

    Raises:
        CheckpointError: a part is missing; every missing one is listed, with what makes it.
    """
    parts = {
        "base": "download the base there",
        "adapter": "download the adapter there",
        "export": f"make it: python -m worker export {root}/base {root}/adapter {root}/export",
    }
    missing = [
        f"{root / part}: no such folder; {remedy}" for part, remedy in parts.items() if not (root / part).is_dir()
    ]
    if missing:
        raise CheckpointError(missing)
    return CheckpointPaths(root / "base", root / "adapter", root / "export", _own_pin_file(root))


def find_pin(root: Path, given: Path | None) -> Pin:
    """The pin file that was given; else the `pin.json` in `root`; else the shipped pin.

    Raises:
        CheckpointError: the pin file is not in order.
    """
    pin_file = given or _own_pin_file(root)
    return published_pin() if pin_file is None else load_pin(pin_file)


def _own_pin_file(root: Path) -> Path | None:
    """A dangling link counts as one: it must not silently mean the published checkpoint."""
    return root / PIN if os.path.lexists(root / PIN) else None


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the block ends well and is gone when it does not.

    What a killed run left behind is cleared by the next one; it never bears the name `out`.

    Raises:
        FileExistsError: `out` is there already, or another process is making it.
    """
    refuse_existing(out)
    stage = out.parent / f".{out.name}.partial"
    stage.mkdir(parents=True, exist_ok=True)
    with _locked(stage, out):
        try:
            _clear(stage)
            yield stage
            sync_folder(stage)
            stage.rename(out)
            _sync(out.parent)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise


def refuse_existing(out: Path) -> None:
    """Nothing is overwritten.

    Raises:
        FileExistsError: `out` is there already.
    """
    if os.path.lexists(out):
        raise FileExistsError(f"{out} is there already; remove it first or choose another place")


def sync_folder(folder: Path) -> None:
    """Bring a folder and everything below it to the disk."""
    for directory, _, names in os.walk(folder):
        for path in (*(Path(directory) / name for name in names), Path(directory)):
            _sync(path)


def _sync(path: Path) -> None:
    """Bring a file, or a folder's own entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileExistsError(f"{out} is being made by another process") from error
        yield
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
