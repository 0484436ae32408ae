"""One worker a device: a lock file that holds the worker's name. The kernel frees it when the process is gone."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import NamedTuple


class Device(NamedTuple):
    """Where an engine computes: torch's name for it, a person's, and one that is unique on the host."""

    name: str
    description: str
    key: str


class DeviceTaken(RuntimeError):
    """Another worker of this host has the device; the message names it."""


class DeviceLock:
    """The right to a device, held until `release` or the process's end."""

    def __init__(self, folder: Path, device: str, worker_name: str) -> None:
        """Take the lock.

        Raises:
            DeviceTaken: another process holds it.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', device)}.lock"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._descriptor)
            raise DeviceTaken(
                f"{device} of this host belongs to worker {holder} already; one worker a device: stop that one, or "
                "choose another --device"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{worker_name} (pid {os.getpid()})\n".encode(), 0)

    def release(self) -> None:
        """Give the device back."""
        os.close(self._descriptor)
