"""Pin files: which files a checkpoint is made of, each by size and SHA-256, and the name it may answer under.

The product ships one, for the published checkpoint; `synthesize` writes others. The name is derived from a pin's
contents, so a file that was changed anywhere cannot keep it. It reads no checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.strict_json import Fields, canonical_sha256, parse_object, pretty
from engine.errors import CheckpointError

FORMAT = "cua-checkpoint-pin"
VERSION = 1
PUBLISHED_NAME = "cua-s1-4b-0.2"
# The published adapter repository holds a text adapter beside the one in use; every checkpoint keeps that layout.
ADAPTER_FOLDER = "multimodal"
_PUBLISHED_FILE = Path(__file__).parent / "pins" / f"{PUBLISHED_NAME}.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAME_RULE = "1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
_PATH_PART = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True)
class PinnedFile:
    """One file; an `optional` one may be absent (a partial download), but when it is there it must be this one."""

    size_bytes: int
    sha256: str
    optional: bool = False


@dataclass(frozen=True)
class PinnedRepository:
    """Where files come from; their paths are relative to the download's folder; `folder` is the part in use."""

    repository: str
    revision: str
    folder: str
    files: Mapping[str, PinnedFile]


@dataclass(frozen=True)
class Pin:
    """A parsed pin file. `sha256` is the hash of its contents, whatever their layout in the file."""

    name: str
    base: PinnedRepository
    adapter: PinnedRepository
    provenance: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """SHA-256 of the pin's canonical form."""
        return canonical_sha256(self.as_json())

    @property
    def is_published(self) -> bool:
        """Is this the shipped pin, to the last value?"""
        return self.sha256 == published_pin().sha256

    @property
    def identity(self) -> str:
        """The name that answers carry: the published one for the shipped pin alone, `<name>@<hash>` for any other."""
        if self.is_published:
            return f"{self.adapter.repository}@{self.adapter.revision}:{self.adapter.folder}"
        return f"{self.name}@{self.sha256[:12]}"

    def as_json(self) -> dict[str, object]:
        """The pin file's contents."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "base": _repository_json(self.base),
            "adapter": _repository_json(self.adapter),
            "provenance": dict(self.provenance),
        }

    def write(self, path: Path) -> None:
        """Write the pin file."""
        path.write_bytes(pretty(self.as_json()))


def published_pin() -> Pin:
    """The pin of the published checkpoint, as this product ships it."""
    return _parse(_PUBLISHED_FILE.read_bytes(), _PUBLISHED_FILE.name)


def load_pin(path: Path) -> Pin:
    """Read a pin file.

    Raises:
        CheckpointError: it cannot be read, a value is wrong or unknown, or it claims the published name or repository
            without being the shipped pin. Every fault is listed.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError([f"{path}: the pin file cannot be read ({error.strerror})"]) from error
    pin = _parse(text, path.name)
    _refuse_claims(pin, path.name)
    return pin


def check_name(name: str) -> None:
    """Can a checkpoint of one's own be called so?

    Raises:
        CheckpointError: it is not a name, or it is the published checkpoint's.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError([f"the name must be {_NAME_RULE}, found {name!r}"])
    if name.casefold() == PUBLISHED_NAME:
        raise CheckpointError([f"the name {name!r} is the published checkpoint's; give the checkpoint its own"])


def _refuse_claims(pin: Pin, place: str) -> None:
    published = published_pin()
    claims = [
        f"{what} {value!r}"
        for what, value, reserved in (
            ("the name", pin.name, published.name),
            ("the adapter repository", pin.adapter.repository, published.adapter.repository),
        )
        if value.casefold() == reserved.casefold()
    ]
    if claims and not pin.is_published:
        raise CheckpointError(
            [
                f"{place}: claims {' and '.join(claims)} of the published checkpoint, but is not the shipped pin "
                f"(found {pin.sha256}, expected {published.sha256}); give the checkpoint its own name"
            ]
        )


def _parse(text: bytes, place: str) -> Pin:
    faults: list[str] = []
    fields = Fields(parse_object(text, place), place, faults)
    fields.only("format", [FORMAT])
    fields.only("version", [VERSION])
    name = fields.text("name")
    if not _NAME.fullmatch(name):
        fields.fault("name", f"must be {_NAME_RULE}, found {name!r}")
    base = _repository(fields.take("base"), "", f"{place}: base", faults)
    adapter = _repository(fields.take("adapter"), ADAPTER_FOLDER, f"{place}: adapter", faults)
    provenance = fields.mapping("provenance")
    if not all(isinstance(value, str) for value in provenance.values()):
        fields.fault("provenance", f"must hold strings only, found {provenance!r}")
    fields.finish()
    if faults:
        raise CheckpointError(faults)
    return Pin(name, base, adapter, {key: str(value) for key, value in provenance.items()})


def _repository(value: object, folder: str, place: str, faults: list[str]) -> PinnedRepository:
    fields = Fields(value, place, faults)
    repository, revision = fields.text("repository"), fields.text("revision")
    fields.only("folder", [folder])
    files = {}
    for path, entry in fields.mapping("files").items():
        if not is_confined(path):
            fields.fault("files", f"has the path {path!r}; it must stay inside the download's folder")
        files[path] = _file(entry, f"{place}: {path}", faults)
    if not files:
        fields.fault("files", "names no file")
    fields.finish()
    return PinnedRepository(repository, revision, folder, files)


def is_confined(path: str) -> bool:
    """Is this a plain relative path that stays below its folder, and out of the downloader's own `.cache`?"""
    parts = path.split("/")
    return parts[0] != ".cache" and all(_PATH_PART.fullmatch(part) and part not in (".", "..") for part in parts)


def _file(value: object, place: str, faults: list[str]) -> PinnedFile:
    fields = Fields(value, place, faults)
    file = PinnedFile(fields.count("size_bytes"), fields.sha256("sha256"), fields.flag("optional"))
    fields.finish()
    return file


def _repository_json(pinned: PinnedRepository) -> dict[str, object]:
    files = {}
    for path in sorted(pinned.files):
        file = pinned.files[path]
        entry: dict[str, object] = {"size_bytes": file.size_bytes, "sha256": file.sha256}
        files[path] = entry | {"optional": True} if file.optional else entry
    return {
        "repository": pinned.repository,
        "revision": pinned.revision,
        "folder": pinned.folder,
        "files": files,
    }
