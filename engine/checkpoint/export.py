"""The export: the language model with its LoRA merged into BF16, once, as safetensors with a manifest.

Both sources are verified first; tensors stream one by one from the base's shards to the export's, hashed on the way.
The folder appears under its name only when everything, the manifest last, is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch

from engine.checkpoint.files import READ_BYTES, Counter, open_regular
from engine.checkpoint.layout import LORA_ALPHA, LORA_RANK, LoraModule, language_tensors, lora_modules
from engine.checkpoint.manifest import Manifest
from engine.checkpoint.paths import (
    ADAPTER_WEIGHTS,
    CONFIG,
    MANIFEST,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
    staged_folder,
)
from engine.checkpoint.pins import Pin, PinnedFile
from engine.checkpoint.report import Report, silent
from engine.checkpoint.tensor_files import FilePlan, Tensor, plan_file, read_bytes, read_header, read_pieces
from engine.checkpoint.verify import verify_sources

# Shards of this size are written, and later hashed, side by side.
MAX_SHARD_BYTES = 2_500_000_000
# A merge holds its tensor once in BF16 and three times in float32; four at once stay under 2 GB at full size.
_THREADS = 4
_REPORT_INTERVAL_S = 0.1
_COPIED = (CONFIG, TOKENIZER, TOKENIZER_CONFIG)


def merge_lora(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """A weight with its LoRA pair merged: product, scale and sum in float32, rounded once.

    Args:
        weight: `bfloat16 [outputs, inputs]`.
        a: `float32 [rank, inputs]`.
        b: `float32 [outputs, rank]`.
        scale: alpha / rank.

    Returns:
        `bfloat16 [outputs, inputs]`, `W + scale * (B A)` (LoRA, Hu et al. 2021, section 4.1), the bits of PEFT's
        `merge_and_unload` on the same machine.
    """
    return (weight.float() + (b @ a) * scale).to(torch.bfloat16)


def export_checkpoint(base: Path, adapter: Path, out: Path, pin: Pin, report: Report = silent) -> Manifest:
    """Verify base and adapter against `pin`, then write the merged language model to `out`.

    Args:
        base: the base's download.
        adapter: the adapter's download, with its `multimodal/` folder.
        out: the folder to make.
        pin: what both must be.
        report: told of the bytes verified, then of those written.

    Returns:
        The manifest that was written.

    Raises:
        CheckpointError: a source is not what the pin says, or was changed while it was read; every mismatch is listed.
        FileExistsError: `out` is there already.
    """
    with staged_folder(out) as stage:
        sources = verify_sources(base, adapter, pin, report)
        with ExitStack() as stack:
            shards = [path for path in sources.stamps if path.parent == base and path.suffix == ".safetensors"]
            tensors = _Sources(stack, shards, adapter / ADAPTER_WEIGHTS)
            plans = _plan_shards([tensors.base[spec.name][1] for spec in language_tensors(sources.config.text)])
            merges = {module.weight_name: module for module in lora_modules(sources.config)}
            files = _write_shards(stage, plans, lambda tensor: _merged(tensor, tensors, merges), report)
        files |= _write_small_files(stage, base, plans)
        sources.recheck()
        manifest = Manifest(pin, files)
        (stage / MANIFEST).write_bytes(manifest.as_bytes())
    return manifest


class _Sources:
    """The open tensor files of base and adapter: each tensor's file and place, by name."""

    def __init__(self, stack: ExitStack, shards: Sequence[Path], adapter: Path) -> None:
        self.base: dict[str, tuple[BinaryIO, Tensor]] = {}
        for shard in shards:
            file = stack.enter_context(open_regular(shard))
            self.base |= {name: (file, tensor) for name, tensor in read_header(file, shard.name).items()}
        file = stack.enter_context(open_regular(adapter))
        self.adapter = {name: (file, tensor) for name, tensor in read_header(file, adapter.name).items()}


def _plan_shards(tensors: Sequence[Tensor]) -> dict[str, FilePlan]:
    """The export's files: the tensors in the model's order, a new shard whenever one would grow over the limit."""
    groups: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(one.size_bytes for one in groups[-1]) + tensor.size_bytes > MAX_SHARD_BYTES:
            groups.append([])
        groups[-1].append(tensor)
    count = len(groups)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else [WEIGHTS]
    return {
        name: plan_file((tensor.name, tensor.dtype, tensor.shape) for tensor in group)
        for name, group in zip(names, groups, strict=True)
    }


def _merged(target: Tensor, sources: _Sources, merges: Mapping[str, LoraModule]) -> Iterator[bytes | bytearray]:
    """A tensor's bytes in the export: the base's own, or with its pair merged."""
    file, stored = sources.base[target.name]
    module = merges.get(target.name)
    if module is None:
        yield from read_pieces(file, stored, READ_BYTES)
        return
    weight = torch.frombuffer(read_bytes(file, stored), dtype=torch.bfloat16).view(stored.shape)
    a, b = (_float32(*sources.adapter[name]) for name in (module.a_name, module.b_name))
    merged = bytearray(stored.size_bytes)
    torch.frombuffer(merged, dtype=torch.bfloat16).copy_(merge_lora(weight, a, b, LORA_ALPHA / LORA_RANK).flatten())
    yield merged


def _float32(file: BinaryIO, tensor: Tensor) -> torch.Tensor:
    return torch.frombuffer(read_bytes(file, tensor), dtype=torch.float32).view(tensor.shape)


_TensorBytes = Callable[[Tensor], Iterator[bytes | bytearray]]


def _write_shards(
    stage: Path, plans: Mapping[str, FilePlan], tensor_bytes: _TensorBytes, report: Report
) -> dict[str, PinnedFile]:
    """Write all shards, a thread each, and hash them on the way."""
    total_bytes = sum(plan.size_bytes for plan in plans.values())
    counter = Counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = {
            name: pool.submit(_write_shard, stage / name, plan, tensor_bytes, counter) for name, plan in plans.items()
        }
        pending = set(futures.values())
        while pending:
            _, pending = wait(pending, timeout=_REPORT_INTERVAL_S, return_when=FIRST_COMPLETED)
            if pending:
                report("export", min(counter.count, total_bytes - 1), total_bytes)
        files = {name: future.result() for name, future in futures.items()}
    report("export", total_bytes, total_bytes)
    return files


def _write_shard(path: Path, plan: FilePlan, tensor_bytes: _TensorBytes, counter: Counter) -> PinnedFile:
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        for piece in _shard_bytes(plan, tensor_bytes):
            digest.update(piece)
            _write_all(file, piece)
            counter.add(len(piece))
        size_bytes = file.tell()
    assert size_bytes == plan.size_bytes, "a shard is as long as its header says"
    return PinnedFile(size_bytes, digest.hexdigest())


def _shard_bytes(plan: FilePlan, tensor_bytes: _TensorBytes) -> Iterator[bytes | bytearray]:
    yield plan.header
    for tensor in plan.tensors:
        yield from tensor_bytes(tensor)


def _write_all(file: BinaryIO, piece: bytes | bytearray) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(file.fileno(), rest) :]


def _write_small_files(stage: Path, base: Path, plans: Mapping[str, FilePlan]) -> dict[str, PinnedFile]:
    texts = {name: (base / name).read_bytes() for name in _COPIED}
    if len(plans) > 1:
        weight_map = {tensor.name: name for name, plan in plans.items() for tensor in plan.tensors}
        total_bytes = sum(tensor.size_bytes for plan in plans.values() for tensor in plan.tensors)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        texts[WEIGHTS_INDEX] = json.dumps(index, indent=2).encode()
    for name, text in texts.items():
        (stage / name).write_bytes(text)
    return {name: PinnedFile(len(text), hashlib.sha256(text).hexdigest()) for name, text in texts.items()}
