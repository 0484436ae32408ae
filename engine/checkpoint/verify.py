"""Verification: every byte behind a checkpoint's name is checked before the name is spoken or a tensor is loaded.

Files first (their names, sizes and SHA-256, against the pin and the export's manifest), then what they hold (`checks`).
Every mismatch is listed. What was verified is what is loaded: `recheck` notices a file swapped since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.checks import check_export, check_sources
from engine.checkpoint.files import Stamp, hash_files, list_folder
from engine.checkpoint.manifest import Manifest, load_manifest
from engine.checkpoint.paths import MANIFEST, CheckpointPaths
from engine.checkpoint.pins import Pin, PinnedFile
from engine.checkpoint.report import Report, silent
from engine.config import ModelConfig
from engine.errors import CheckpointError


@dataclass(frozen=True)
class Identity:
    """What answers call their checkpoint: `name`, and the hashes behind it (`pin_sha256`, `export_sha256`)."""

    name: str
    hashes: Mapping[str, str]


@dataclass(frozen=True)
class Sources:
    """A base and an adapter that are what their pin says."""

    config: ModelConfig
    stamps: Mapping[Path, Stamp]

    def recheck(self) -> None:
        """Look at every file again: to be called when everything is read, before anything is said of it.

        Raises:
            CheckpointError: one is not the file that was verified any more.
        """
        _recheck(self.stamps)


@dataclass(frozen=True)
class Verified(Sources):
    """A whole checkpoint that is what its pin and its manifest say; only verification makes one."""

    identity: Identity
    pin: Pin


@dataclass(frozen=True)
class _Folder:
    """A folder and what belongs in it; `unhashed` are paths that are checked elsewhere."""

    path: Path
    files: Mapping[str, PinnedFile]
    unhashed: frozenset[str] = frozenset()


def verify_sources(base: Path, adapter: Path, pin: Pin, report: Report = silent) -> Sources:
    """Check every file of a base and an adapter, byte by byte, and what the files hold.

    Args:
        base: the base's download.
        adapter: the adapter's download, with its `multimodal/` folder.
        pin: what both must be.
        report: told of the bytes hashed.

    Raises:
        CheckpointError: with every mismatch found; each names the file, what was expected and what was found.
    """
    mismatches: list[str] = []
    folders = [_Folder(base, pin.base.files), _Folder(adapter, pin.adapter.files)]
    stamps = _check_files(folders, report, mismatches)
    config = check_sources(base, adapter, pin, stamps, mismatches)
    if mismatches or config is None:
        raise CheckpointError(mismatches)
    return Sources(config, stamps)


def verify_checkpoint(paths: CheckpointPaths, report: Report = silent) -> Verified:
    """Check every file of a checkpoint, byte by byte, and what the files hold.

    Args:
        paths: its folders, from `open_checkpoint`.
        report: told of the bytes hashed.

    Raises:
        CheckpointError: with every mismatch found; each names the file, what was expected and what was found.
    """
    pin = paths.pin()
    mismatches: list[str] = []
    manifest = _manifest(paths.export, pin, mismatches)
    folders = [_Folder(paths.base, pin.base.files), _Folder(paths.adapter, pin.adapter.files)]
    if manifest is not None:
        folders.append(_Folder(paths.export, manifest.files, frozenset((MANIFEST,))))
    stamps = _check_files(folders, report, mismatches)
    config = check_sources(paths.base, paths.adapter, pin, stamps, mismatches)
    if config is not None and manifest is not None:
        check_export(paths.export, manifest, config, stamps, mismatches)
    if mismatches or config is None or manifest is None:
        raise CheckpointError(mismatches)
    identity = Identity(pin.identity, {"pin_sha256": pin.sha256, "export_sha256": manifest.sha256})
    return Verified(config, stamps, identity, pin)


def _manifest(export: Path, pin: Pin, mismatches: list[str]) -> Manifest | None:
    try:
        return load_manifest(export, pin)
    except CheckpointError as error:
        mismatches += error.mismatches
        return None


def _check_files(folders: Sequence[_Folder], report: Report, mismatches: list[str]) -> dict[Path, Stamp]:
    """Names, sizes and SHA-256 of everything in the folders; the stamps of the files that are as they should be."""
    expected: dict[Path, PinnedFile] = {}
    labels: dict[Path, str] = {}
    for folder in folders:
        candidates = _check_names(folder, mismatches)
        expected |= candidates
        labels |= {path: f"{folder.path.name}/{path.relative_to(folder.path)}" for path in candidates}
    stamps = {}
    hashed = hash_files({path: file.size_bytes for path, file in expected.items()}, "verify", report)
    for path, file in expected.items():
        found = hashed[path]
        if isinstance(found, OSError):
            mismatches.append(f"{labels[path]}: cannot be read ({found})")
        elif found.stamp.size_bytes != file.size_bytes:
            mismatches.append(f"{labels[path]}: size {found.stamp.size_bytes}, expected {file.size_bytes} bytes")
        elif found.sha256 != file.sha256:
            mismatches.append(f"{labels[path]}: SHA-256 {found.sha256}, expected {file.sha256}")
        else:
            stamps[path] = found.stamp
    return stamps


def _check_names(folder: _Folder, mismatches: list[str]) -> dict[Path, PinnedFile]:
    """The folder's listed files that are there; what is missing, not listed or no regular file is a mismatch."""
    name = folder.path.name
    there: dict[Path, PinnedFile] = {}
    found: set[str] = set()
    try:
        listing = list(list_folder(folder.path))
    except OSError as error:
        mismatches.append(f"{folder.path}: cannot be listed ({error.strerror})")
        return {}
    for path, kind in listing:
        found.add(path)
        if kind != "file":
            mismatches.append(
                f"{name}/{path}: found {kind}; only regular files belong here, copy the file itself there"
            )
        elif path in folder.files:
            there[folder.path / path] = folder.files[path]
        elif path not in folder.unhashed:
            mismatches.append(f"{name}/{path}: found a file that is not listed; remove it")
    for path, file in folder.files.items():
        if path not in found and not file.optional:
            mismatches.append(f"{name}/{path}: not found, expected a file of {file.size_bytes} bytes")
    return there


def _recheck(stamps: Mapping[Path, Stamp]) -> None:
    mismatches = []
    for path, stamp in stamps.items():
        try:
            found: Stamp | str = Stamp.of(path)
        except OSError as error:
            found = f"nothing readable ({error.strerror})"
        if found != stamp:
            mismatches.append(
                f"{path.parent.name}/{path.name}: was changed after it was verified: found {found}, expected {stamp}"
            )
    if mismatches:
        raise CheckpointError(mismatches)
