"""The worker: takes jobs from the queue, lets the engine decide, writes answers. Read `worker.py` first.

Importing this package loads neither torch nor the engine; `rq info` and `--help` stay quick and need no GPU machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.worker import GpuWorker

__all__ = ["GpuWorker"]


def __getattr__(name: str) -> object:
    if name == "GpuWorker":
        from worker.worker import GpuWorker

        return GpuWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
