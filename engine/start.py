"""Verification and loading side by side: both read the same files, neither needs the other, both must succeed.

Loading gives no name to anything: the identity comes from verification alone, and only when both are done.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from engine.checkpoint import CheckpointPaths, Verified, verify_checkpoint
from engine.checkpoint.files import Stamp, list_folder
from engine.checkpoint.report import Report, silent
from engine.errors import CheckpointError
from engine.model import Model, load_model

_REPORT_INTERVAL_S = 0.2


def verify_and_load(
    checkpoint: CheckpointPaths, device: torch.device, dtype: torch.dtype, report: Report = silent
) -> tuple[Verified, Model]:
    """Check every byte of a checkpoint while its tensors go to the device.

    Args:
        checkpoint: its folders.
        device: where the tensors go.
        dtype: the model dtype.
        report: told from this thread alone, first of the verification, then of what is left of the loading.

    Raises:
        CheckpointError: anything missing, left over, changed or not of this layout. The verification's faults come
            first: what loading found in files that are not as pinned is of no interest.

    `Verified.recheck` is the caller's, when everything is read.
    """
    seen = _stamps(checkpoint)
    progress = _Progress()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as pool:
        loading = pool.submit(
            load_model,
            checkpoint.base,
            checkpoint.adapter,
            checkpoint.export,
            device=device,
            dtype=dtype,
            report=progress,
        )
        verified = verify_checkpoint(checkpoint, report)
        model = _finish(loading, progress, report)
    # Loading may have read a file before it was swapped for the one that was verified.
    swapped = [path for path, stamp in verified.stamps.items() if seen.get(path) != stamp]
    if swapped:
        raise CheckpointError([f"{path.parent.name}/{path.name}: was swapped while it was loaded" for path in swapped])
    return verified, model


def _stamps(checkpoint: CheckpointPaths) -> dict[Path, Stamp]:
    folders = (checkpoint.base, checkpoint.adapter, checkpoint.export)
    return {
        folder / name: Stamp.of(folder / name)
        for folder in folders
        for name, kind in list_folder(folder)
        if kind == "file"
    }


class _Progress:
    """What the loading thread last said."""

    def __init__(self) -> None:
        self.done_bytes, self.total_bytes = 0, 1

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        self.done_bytes, self.total_bytes = done_bytes, total_bytes


def _finish(loading: Future[Model], progress: _Progress, report: Report) -> Model:
    while wait([loading], timeout=_REPORT_INTERVAL_S).not_done:
        report("load", min(progress.done_bytes, progress.total_bytes - 1), progress.total_bytes)
    model = loading.result()
    report("load", progress.total_bytes, progress.total_bytes)
    return model
