"""Synthetic checkpoints: random weights in the published layout, with which the whole path runs and means nothing.

The tensors stream to the disk in blocks, made by many threads; memory stays far below the checkpoint's size. What the
values are is `recipe`'s part.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.files import hash_files, list_folder
from engine.checkpoint.layout import (
    LANGUAGE_TARGETS,
    LORA_ALPHA,
    LORA_RANK,
    VISION_TARGETS,
    TensorSpec,
    adapter_tensors,
    base_tensors,
    mtp_layer_count,
)
from engine.checkpoint.paths import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    PIN,
    PREPROCESSOR_CONFIG,
    WEIGHTS_INDEX,
    refuse_existing,
    staged_folder,
)
from engine.checkpoint.pins import ADAPTER_FOLDER, Pin, PinnedFile, PinnedRepository, check_name, load_pin
from engine.checkpoint.recipe import BLOCK_VALUES, block_bytes, block_count
from engine.checkpoint.report import Report, silent
from engine.checkpoint.sizes import PREPROCESSOR, Size, model_config
from engine.checkpoint.tensor_files import DTYPE_BYTES, FilePlan, Tensor, plan_file
from engine.checkpoint.tokenizer import build_tokenizer
from engine.config import ModelConfig
from engine.errors import CheckpointError

PROVENANCE = {"source": "synthetic: random weights, its choices mean nothing"}
_SHARDS = 2
# The published first shard's part of all bytes, so that a start at full size reads files like the published ones.
_FIRST_SHARD_SHARE = 0.572


@dataclass(frozen=True)
class TensorFiles:
    """The tensor files of a checkpoint, planned and not yet written: paths below the checkpoint's folder."""

    plans: Mapping[str, FilePlan]
    index: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(plan.size_bytes for plan in self.plans.values())


def synthesize(out: Path, size: Size, seed: int = 0, name: str | None = None, report: Report = silent) -> Pin:
    """Write `out/base`, `out/adapter` and `out/pin.json`: a synthetic checkpoint with Qwen3.5's tokenizer.

    Args:
        out: the folder to make.
        size: `tiny` (48 MB) or `full` (the published sizes, 9.4 GB).
        seed: of every value; the same seed gives the same bytes.
        name: what its answers call it, before their hash; `synthetic-<size>-<seed>` when None.
        report: told of the bytes written, then of those hashed.

    Returns:
        The pin that was written.

    Raises:
        CheckpointError: the name is not one, or is the published checkpoint's.
        FileExistsError: `out` is there already.
        ModuleNotFoundError: the extra `synthetic` is not installed.
    """
    name = f"synthetic-{size}-{seed}" if name is None else name
    refuse_existing(out)  # before the seconds that the tokenizer takes
    return write_checkpoint(out, model_config(size), build_tokenizer(), name=name, seed=seed, report=report)


def write_checkpoint(
    out: Path,
    raw_config: Mapping[str, object],
    tokenizer: Mapping[str, bytes],
    *,
    name: str,
    seed: int = 0,
    report: Report = silent,
) -> Pin:
    """Write a synthetic checkpoint of any sizes.

    Args:
        out: the folder to make.
        raw_config: the contents of `config.json`.
        tokenizer: the tokenizer's files, by name.
        name: what its answers call it, before their hash.
        seed: of every value.
        report: told of the bytes written, then of those hashed.

    Returns:
        The pin that was written.

    Raises:
        CheckpointError: the config is not one, or the name is the published checkpoint's.
        FileExistsError: `out` is there already.
    """
    check_name(name)
    planned = plan_tensor_files(raw_config)
    with staged_folder(out) as stage:
        (stage / "base").mkdir()
        (stage / "adapter" / ADAPTER_FOLDER).mkdir(parents=True)
        for path, text in small_files(raw_config, planned, tokenizer, f"{name}-base").items():
            (stage / path).write_bytes(text)
        _write_tensors(stage, planned, seed, report)
        pin = make_pin(stage, name, f"seed-{seed}", PROVENANCE, report)
        pin.write(stage / PIN)
    return pin


def remove_synthetic(out: Path) -> None:
    """Remove a folder, if it is there, that `synthesize` made; any other is left alone.

    Raises:
        FileExistsError: it is there and does not say that it is synthetic.
    """
    if not os.path.lexists(out):
        return
    try:
        is_synthetic = load_pin(out / PIN).provenance == PROVENANCE
    except CheckpointError:
        is_synthetic = False
    if not is_synthetic:
        raise FileExistsError(f"{out} is there already and is not a synthetic checkpoint; remove it by hand")
    shutil.rmtree(out)


def plan_tensor_files(raw_config: Mapping[str, object]) -> TensorFiles:
    """Lay out the base's shards and the adapter for the contents of a `config.json`."""
    config = ModelConfig.from_dict(raw_config)
    shards = _split(base_tensors(config, mtp_layer_count(raw_config)))
    names = [f"model.safetensors-{number:05}-of-{_SHARDS:05}.safetensors" for number in range(1, _SHARDS + 1)]
    base = {name: plan_file(map(_as_written, shard)) for name, shard in zip(names, shards, strict=True)}
    weight_map = {tensor.name: name for name, plan in base.items() for tensor in plan.tensors}
    total_bytes = sum(tensor.size_bytes for plan in base.values() for tensor in plan.tensors)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    adapter = plan_file(map(_as_written, adapter_tensors(config)))
    return TensorFiles(
        {f"base/{name}": plan for name, plan in base.items()} | {f"adapter/{ADAPTER_WEIGHTS}": adapter},
        json.dumps(index, indent=2).encode(),
    )


def _as_written(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    return spec.name, spec.dtypes[0], spec.shape


def _split(specs: Iterable[TensorSpec]) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """The base's tensors, in name order, as two shards."""
    ordered = sorted(specs, key=lambda spec: spec.name)
    sizes = [Tensor(*_as_written(spec), start=0).size_bytes for spec in ordered]
    limit = sum(sizes) * _FIRST_SHARD_SHARE
    count = next(count for count in range(1, len(sizes)) if sum(sizes[:count]) >= limit)
    return ordered[:count], ordered[count:]


def small_files(
    raw_config: Mapping[str, object], planned: TensorFiles, tokenizer: Mapping[str, bytes], base_name: str
) -> dict[str, bytes]:
    """All of a checkpoint's files that hold no tensors, but the pin: their contents by path below its folder."""
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted((*LANGUAGE_TARGETS, *VISION_TARGETS)),
    }
    return {f"base/{name}": text for name, text in tokenizer.items()} | {
        f"base/{CONFIG}": json.dumps(raw_config, indent=2).encode(),
        f"base/{PREPROCESSOR_CONFIG}": json.dumps(PREPROCESSOR, indent=2).encode(),
        f"base/{WEIGHTS_INDEX}": planned.index,
        f"adapter/{ADAPTER_CONFIG}": json.dumps(adapter_config, indent=2).encode(),
    }


def _write_tensors(stage: Path, planned: TensorFiles, seed: int, report: Report) -> None:
    """Write all tensor files, block by block, in whatever order the threads come to them."""
    total_bytes, done_bytes = planned.size_bytes, 0
    descriptors = {path: os.open(stage / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644) for path in planned.plans}
    threads = os.cpu_count() or 1
    try:
        for path, plan in planned.plans.items():
            done_bytes += os.pwrite(descriptors[path], plan.header, 0)
        with ThreadPoolExecutor(threads) as pool:
            pending: set[Future[int]] = set()
            for path, tensor, block in _blocks(planned):
                pending.add(pool.submit(_write_block, descriptors[path], tensor, block, seed))
                if len(pending) >= 4 * threads:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    done_bytes += sum(future.result() for future in done)
                    report("synthesize", done_bytes, total_bytes)
            done_bytes += sum(future.result() for future in pending)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    assert done_bytes == total_bytes, "every byte of every tensor file is written once"
    report("synthesize", done_bytes, total_bytes)


def _blocks(planned: TensorFiles) -> Iterator[tuple[str, Tensor, int]]:
    for path, plan in planned.plans.items():
        for tensor in plan.tensors:
            for block in range(block_count(tensor)):
                yield path, tensor, block


def _write_block(descriptor: int, tensor: Tensor, block: int, seed: int) -> int:
    values = memoryview(block_bytes(tensor, block, seed))
    at = tensor.start + block * BLOCK_VALUES * DTYPE_BYTES[tensor.dtype]
    written = 0
    while written < len(values):
        written += os.pwrite(descriptor, values[written:], at + written)
    return written


def make_pin(root: Path, name: str, revision: str, provenance: Mapping[str, str], report: Report = silent) -> Pin:
    """A pin of all that lies in `root/base` and `root/adapter` now.

    Raises:
        OSError: a file cannot be read.
    """
    folders = {role: root / role for role in ("base", "adapter")}
    files = {
        folder / path: (role, path)
        for role, folder in folders.items()
        for path, kind in list_folder(folder)
        if kind == "file"
    }
    hashed = hash_files({path: path.stat().st_size for path in files}, "hash", report)
    pinned: dict[str, dict[str, PinnedFile]] = {role: {} for role in folders}
    for path, (role, relative) in files.items():
        found = hashed[path]
        if isinstance(found, OSError):
            raise found
        pinned[role][relative] = PinnedFile(found.stamp.size_bytes, found.sha256)
    base = PinnedRepository(f"{name}-base", revision, "", pinned["base"])
    adapter = PinnedRepository(f"{name}-adapter", revision, ADAPTER_FOLDER, pinned["adapter"])
    return Pin(name, base, adapter, provenance)
