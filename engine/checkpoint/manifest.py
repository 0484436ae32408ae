"""The record of an export: which sources it was made from, and each of its files by size and SHA-256.

Every value in it is held against something when it is verified, so no byte of it can change unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.paths import MANIFEST
from engine.checkpoint.pins import Pin, PinnedFile, is_confined
from engine.checkpoint.strict_json import Fields, parse_object, pretty
from engine.errors import CheckpointError

FORMAT = "cua-language-export"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What an export says of itself."""

    pin: Pin
    files: Mapping[str, PinnedFile]

    def as_bytes(self) -> bytes:
        """The manifest file's only form."""
        pinned = self.pin.as_json()
        return pretty(
            {
                "format": FORMAT,
                "version": VERSION,
                "pin": {"name": self.pin.name, "sha256": self.pin.sha256},
                "base": pinned["base"],
                "adapter": pinned["adapter"],
                "files": {
                    path: {"size_bytes": self.files[path].size_bytes, "sha256": self.files[path].sha256}
                    for path in sorted(self.files)
                },
            }
        )

    @property
    def sha256(self) -> str:
        """SHA-256 of the manifest file; it covers every byte of the export."""
        return hashlib.sha256(self.as_bytes()).hexdigest()


def load_manifest(export: Path, pin: Pin) -> Manifest:
    """Read an export's manifest and hold it against the pin.

    Raises:
        CheckpointError: it cannot be read, a value is wrong or unknown, or it was made from other sources.
    """
    place = f"{export.name}/{MANIFEST}"
    try:
        text = (export / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(
            [f"{place}: cannot be read ({error.strerror}); an export without it is unfinished, make it again"]
        ) from error
    faults: list[str] = []
    fields = Fields(parse_object(text, place), place, faults)
    fields.only("format", [FORMAT])
    fields.only("version", [VERSION])
    made_from = Fields(fields.take("pin"), f"{place}: pin", faults)
    found = (made_from.text("name"), made_from.sha256("sha256"))
    made_from.finish()
    pinned = pin.as_json()
    for role in ("base", "adapter"):
        if fields.take(role) != pinned[role]:
            fields.fault(role, "is not what the pin says; the export was made from other sources, make it again")
    files = _files(fields, place, faults)
    fields.finish()
    if found != (pin.name, pin.sha256):
        faults.append(f"{place}: was made under the pin {found}, expected {(pin.name, pin.sha256)}; make it again")
    manifest = Manifest(pin, files)
    if not faults and manifest.as_bytes() != text:
        faults.append(f"{place}: its bytes are not in the form in which an export writes it; make it again")
    if faults:
        raise CheckpointError(faults)
    return manifest


def _files(fields: Fields, place: str, faults: list[str]) -> dict[str, PinnedFile]:
    files = {}
    for path, value in fields.mapping("files").items():
        if not is_confined(path) or path == MANIFEST:
            fields.fault("files", f"has the path {path!r}; it must stay inside the export's folder")
        entry = Fields(value, f"{place}: {path}", faults)
        files[path] = PinnedFile(entry.count("size_bytes"), entry.sha256("sha256"))
        entry.finish()
    return files
