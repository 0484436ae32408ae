"""Verification and loading side by side: both read the same files, neither needs the other, both must succeed.

Loading gives no name to anything: the identity comes from verification alone, and only when both are done.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from engine.checkpoint import CheckpointPaths, Verified, verify_checkpoint
from engine.checkpoint.files import Stamp, list_folder
from engine.checkpoint.report import Report, silent
from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import CheckpointError
from engine.model import Model, load_model

_REPORT_INTERVAL_S = 0.2


class Loaded(NamedTuple):
    """What a start reads from a checkpoint's files."""

    model: Model
    tokenizer: Tokenizer


def verify_and_load(
    checkpoint: CheckpointPaths, device: torch.device, dtype: torch.dtype, report: Report = silent
) -> tuple[Verified, Loaded]:
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
        loading = pool.submit(_load, checkpoint, device, dtype, progress)
        verified = verify_checkpoint(checkpoint, report)
        loaded = _finish(loading, progress, report)
    # Loading may have read a file before it was swapped for the one that was verified.
    swapped = [path for path, stamp in verified.stamps.items() if seen.get(path) != stamp]
    if swapped:
        raise CheckpointError([f"{path.parent.name}/{path.name}: was swapped while it was loaded" for path in swapped])
    return verified, loaded


def _load(checkpoint: CheckpointPaths, device: torch.device, dtype: torch.dtype, report: Report) -> Loaded:
    folders = (checkpoint.base, checkpoint.adapter, checkpoint.export)
    return Loaded(
        load_model(*folders, device=device, dtype=dtype, report=report),
        load_tokenizer(checkpoint.base),
    )


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


def _finish(loading: Future[Loaded], progress: _Progress, report: Report) -> Loaded:
    while wait([loading], timeout=_REPORT_INTERVAL_S).not_done:
        report("load", min(progress.done_bytes, progress.total_bytes - 1), progress.total_bytes)
    loaded = loading.result()
    report("load", progress.total_bytes, progress.total_bytes)
    return loaded
