"""Files of a checkpoint as bytes: what lies in a folder, hashing many files at once, noticing one that was swapped.

It knows sizes, hashes and links, not what the files mean.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from engine.checkpoint.report import Report

READ_BYTES = 8 << 20
_REPORT_INTERVAL_S = 0.1
# What `hf download --local-dir` keeps beside the files it downloads; nothing is ever loaded from it.
_DOWNLOADER_FOLDER = ".cache/huggingface"


@dataclass(frozen=True)
class Stamp:
    """What tells a file from one put in its place: size, modification time, inode and device."""

    size_bytes: int
    mtime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path_or_descriptor: Path | int) -> Stamp:
        """The stamp of a file, links not followed.

        Raises:
            OSError: there is none.
        """
        at = path_or_descriptor
        status = os.fstat(at) if isinstance(at, int) else os.lstat(at)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


@dataclass(frozen=True)
class HashedFile:
    """A file's SHA-256, and its stamp while it was read."""

    sha256: str
    stamp: Stamp


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; a link, a pipe or a device is refused.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def list_folder(folder: Path) -> Iterator[tuple[str, str]]:
    """Everything below `folder` that is not a folder, as `(relative path, kind)`: kind is `file`, or what else it is.

    Links are not followed. An empty folder is listed too; the downloader's own `.cache/huggingface` is not.
    """
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(folder / prefix) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        if not found and prefix:
            yield prefix.rstrip("/"), "an empty folder"
        for entry in found:
            path = f"{prefix}{entry.name}"
            if not entry.is_dir(follow_symlinks=False):
                yield path, _kind(entry)
            elif path != _DOWNLOADER_FOLDER:
                pending.append(f"{path}/")


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "a link"
    return "file" if entry.is_file(follow_symlinks=False) else "a device, pipe or socket"


def hash_file(path: Path, on_bytes: Callable[[int], None]) -> HashedFile:
    """Read a file once; `on_bytes` hears of every piece.

    Raises:
        OSError: it cannot be read, is not a regular file, or changed while it was read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    with open_regular(path) as file:
        before = Stamp.of(file.fileno())
        while count := file.readinto(buffer):  # type: ignore[attr-defined]  # a raw file, as it was opened unbuffered
            digest.update(buffer[:count])
            on_bytes(count)
        if Stamp.of(file.fileno()) != before:
            raise OSError(f"{path} changed while it was read")
    return HashedFile(digest.hexdigest(), before)


def hash_files(sizes: Mapping[Path, int], phase: str, report: Report) -> dict[Path, HashedFile | OSError]:
    """Hash files side by side, the largest first; hashing lets go of the interpreter, so threads suffice.

    Args:
        sizes: each file's expected size in bytes, for the order and the report.
        phase: how the report calls this.
        report: told of the bytes read.

    Returns:
        For every file its hash, or why it could not be read.
    """
    counter = Counter()
    total_bytes = sum(sizes.values())
    order = sorted(sizes, key=lambda path: -sizes[path])
    results: dict[Path, HashedFile | OSError] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = {pool.submit(hash_file, path, counter.add): path for path in order}
        while futures:
            done, _ = wait(futures, timeout=_REPORT_INTERVAL_S, return_when=FIRST_COMPLETED)
            for future in done:
                results[futures.pop(future)] = _outcome(future)
            if futures:
                report(phase, min(counter.count, total_bytes - 1), total_bytes)
    report(phase, total_bytes, total_bytes)
    return results


class Counter:
    """Bytes read by all threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.count = 0

    def add(self, count: int) -> None:
        with self._lock:
            self.count += count


def _outcome(future: Future[HashedFile]) -> HashedFile | OSError:
    try:
        return future.result()
    except OSError as error:
        return error
