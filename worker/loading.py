"""From a checkpoint's folder to an engine on a device. Imported only when a worker starts: it loads torch."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.checkpoint import open_checkpoint
from engine.engine import Engine
from engine.errors import DeviceError
from worker.answer import Report
from worker.lock import Device
from worker.settings import Settings


def choose_device(wanted: str) -> Device:
    """The wanted device (`Settings.device`), or with "" the first GPU, or without one the CPU.

    Raises:
        DeviceError: this machine does not have it.
    """
    device = torch.device(wanted or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        return Device("cpu", f"CPU, {torch.get_num_threads()} threads", "cpu")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"this machine has no cuda:{index}: torch sees {torch.cuda.device_count()} GPUs; use --device cpu"
        )
    torch.cuda.set_device(index)  # kernels are launched on the process's current device
    properties = torch.cuda.get_device_properties(index)
    return Device(f"cuda:{index}", properties.name, str(getattr(properties, "uuid", f"cuda:{index}")))


def device_names() -> list[str]:
    """Every GPU, or without one the CPU."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def load_engine(settings: Settings, device: Device, report: Report) -> Engine:
    """Verify and load the settings' checkpoint.

    Raises:
        CheckpointError: it is not what its pin says, or cannot be loaded.
    """
    return Engine.load(
        open_checkpoint(Path(settings.checkpoint)),
        device=device.name,
        eager=settings.eager,
        image_cache_bytes=settings.image_cache_bytes,
        report=report,
    )
