"""What the files of a checkpoint hold: tensors, configs and tokenizer, held against the layout and each other.

Only files whose bytes were verified are opened. Each check adds its mismatches and goes on; none of them raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from engine.checkpoint.files import open_regular
from engine.checkpoint.layout import (
    LANGUAGE_TARGETS,
    LORA_ALPHA,
    LORA_RANK,
    VISION_TARGETS,
    LoraModule,
    TensorSpec,
    adapter_tensors,
    base_tensors,
    language_tensors,
    lora_modules,
    mtp_layer_count,
)
from engine.checkpoint.manifest import Manifest
from engine.checkpoint.paths import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    PREPROCESSOR_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
)
from engine.checkpoint.pins import Pin, PinnedFile
from engine.checkpoint.sizes import PREPROCESSOR
from engine.checkpoint.strict_json import parse_object
from engine.checkpoint.tensor_files import Tensor, read_header
from engine.checkpoint.tokenizer import load_tokenizer
from engine.config import AdapterConfig, ModelConfig
from engine.errors import CheckpointError
from engine.prompt import IMAGE_PAD, LETTERS

# The published tokenizer's ids of A-Z.
PUBLISHED_LETTER_IDS = tuple(range(32, 58))

_Result = TypeVar("_Result")


def check_sources(
    base: Path, adapter: Path, pin: Pin, sound: Collection[Path], mismatches: list[str]
) -> ModelConfig | None:
    """Check what base and adapter hold.

    Args:
        base: the base's download.
        adapter: the adapter's download.
        pin: what was verified; the letters' ids are fixed for the published checkpoint alone.
        sound: the files whose size and SHA-256 are right.
        mismatches: grows by what is found.

    Returns:
        The model's sizes, or None when they cannot be read.
    """
    _check_listed(base.name, pin.base.files, (CONFIG, PREPROCESSOR_CONFIG, TOKENIZER, TOKENIZER_CONFIG), mismatches)
    _check_listed(adapter.name, pin.adapter.files, (ADAPTER_CONFIG, ADAPTER_WEIGHTS), mismatches)
    if base / CONFIG not in sound:
        return None
    raw_config = _attempt(mismatches, lambda: parse_object((base / CONFIG).read_bytes(), f"{base.name}/{CONFIG}"))
    config = None if raw_config is None else _attempt(mismatches, partial(ModelConfig.from_dict, raw_config))
    if raw_config is None or config is None:
        return None
    _check_tensors(base, pin.base.files, base_tensors(config, mtp_layer_count(raw_config)), sound, mismatches)
    if base / PREPROCESSOR_CONFIG in sound:
        _check_preprocessor(base / PREPROCESSOR_CONFIG, config, mismatches)
    if {base / TOKENIZER, base / TOKENIZER_CONFIG} <= set(sound):
        _check_tokenizer(base, config, PUBLISHED_LETTER_IDS if pin.is_published else None, mismatches)
    if adapter / ADAPTER_CONFIG in sound:
        _check_adapter_config(adapter, config, pin.base.repository, mismatches)
    if adapter / ADAPTER_WEIGHTS in sound:
        _check_adapter_tensors(adapter, config, mismatches)
    return config


def check_export(
    export: Path, manifest: Manifest, config: ModelConfig, sound: Collection[Path], mismatches: list[str]
) -> None:
    """Check what an export holds: the language tensors and nothing else, and the base's own config and tokenizer."""
    copied = (CONFIG, TOKENIZER, TOKENIZER_CONFIG)
    _check_listed(export.name, manifest.files, copied, mismatches)
    for name in copied:
        found, expected = manifest.files.get(name), manifest.pin.base.files.get(name)
        if found is not None and expected is not None and found.sha256 != expected.sha256:
            mismatches.append(
                f"{export.name}/{name}: SHA-256 {found.sha256}, expected the base's own {expected.sha256}"
            )
    _check_tensors(export, manifest.files, language_tensors(config.text), sound, mismatches)


def _attempt(mismatches: list[str], work: Callable[[], _Result]) -> _Result | None:
    """The work's result, or None when it raised mismatches, which are kept."""
    try:
        return work()
    except CheckpointError as error:
        mismatches += error.mismatches
        return None


def _check_listed(place: str, files: Mapping[str, PinnedFile], needed: Iterable[str], mismatches: list[str]) -> None:
    mismatches += [
        f"{place}/{name}: is not listed as a required file; every checkpoint of this layout has it"
        for name in needed
        if name not in files or files[name].optional
    ]


def _check_tensors(
    folder: Path,
    files: Mapping[str, PinnedFile],
    expected: Iterable[TensorSpec],
    sound: Collection[Path],
    mismatches: list[str],
) -> None:
    """The tensors of a folder's shards against what must be there; skipped while a shard's bytes are not right."""
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    if not all(folder / name in sound for name in shards):
        return
    headers = {name: _attempt(mismatches, partial(_header, folder, name)) for name in shards}
    found: dict[str, tuple[str, Tensor]] = {}
    for shard, header in headers.items():
        for name, tensor in (header or {}).items():
            if name in found:
                mismatches.append(f"{folder.name}/{shard}: {name} is also in {found[name][0]}")
            found[name] = (shard, tensor)
    if None in headers.values():
        return
    _compare(folder.name, expected, found, mismatches)
    _check_index(folder, files, {name: shard for name, (shard, _) in found.items()}, sound, mismatches)


def _check_index(
    folder: Path,
    files: Mapping[str, PinnedFile],
    places: Mapping[str, str],
    sound: Collection[Path],
    mismatches: list[str],
) -> None:
    """The index must send every tensor to the shard that holds it; without one, all are in one file."""
    place = f"{folder.name}/{WEIGHTS_INDEX}"
    if WEIGHTS_INDEX not in files:
        if set(places.values()) - {WEIGHTS}:
            mismatches.append(f"{place}: is not listed; tensors outside of {WEIGHTS} need an index")
        return
    if folder / WEIGHTS_INDEX not in sound:
        return
    raw = _attempt(mismatches, lambda: parse_object((folder / WEIGHTS_INDEX).read_bytes(), place))
    if raw is None:
        return
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict):
        mismatches.append(f"{place}: weight_map must be an object, found {weight_map!r}")
        return
    mismatches += [
        f"{place}: {name} in {weight_map.get(name)!r}, expected {places.get(name)!r}"
        for name in sorted({*weight_map, *places})
        if weight_map.get(name) != places.get(name)
    ]


def _header(folder: Path, path: str) -> dict[str, Tensor]:
    place = f"{folder.name}/{path}"
    try:
        with open_regular(folder / path) as file:
            return read_header(file, place)
    except OSError as error:
        raise CheckpointError([f"{place}: cannot be read ({error})"]) from error


def _compare(
    place: str, expected: Iterable[TensorSpec], found: Mapping[str, tuple[str, Tensor]], mismatches: list[str]
) -> None:
    """Every tensor's name, shape and dtype."""
    specs = {spec.name: spec for spec in expected}
    for name, spec in specs.items():
        if name not in found:
            mismatches.append(f"{place}: {name} not found, expected a tensor {list(spec.shape)} {spec.dtypes[0]}")
            continue
        file, tensor = found[name]
        if tensor.shape != spec.shape:
            mismatches.append(f"{place}/{file}: {name} has shape {list(tensor.shape)}, expected {list(spec.shape)}")
        if tensor.dtype not in spec.dtypes:
            mismatches.append(f"{place}/{file}: {name} has dtype {tensor.dtype}, expected {' or '.join(spec.dtypes)}")
    mismatches += [
        f"{place}/{file}: found the tensor {name}, which this layout does not have"
        for name, (file, _) in found.items()
        if name not in specs
    ]


def _check_adapter_tensors(adapter: Path, config: ModelConfig, mismatches: list[str]) -> None:
    header = _attempt(mismatches, lambda: _header(adapter, ADAPTER_WEIGHTS))
    if header is None:
        return
    found = {name: (ADAPTER_WEIGHTS, tensor) for name, tensor in header.items()}
    _compare(adapter.name, adapter_tensors(config), found, mismatches)
    modules = lora_modules(config)
    whole = [module for module in modules if {module.a_name, module.b_name} <= header.keys()]
    if len(whole) != len(modules):
        counts = f"found {_module_count(whole)}, expected {_module_count(modules)}"
        mismatches.append(f"{adapter.name}/{ADAPTER_WEIGHTS}: {counts}")


def _module_count(modules: Collection[LoraModule]) -> str:
    return f"{len(modules)} LoRA modules, {sum(module.is_vision for module in modules)} of them vision"


def _check_adapter_config(adapter: Path, config: ModelConfig, base_repository: str, mismatches: list[str]) -> None:
    """Rank, alpha, target modules and the base's name; `AdapterConfig` refuses whatever is more than plain LoRA."""
    path = adapter / ADAPTER_CONFIG
    place = f"{adapter.name}/{ADAPTER_CONFIG}"
    raw = _attempt(mismatches, lambda: parse_object(path.read_bytes(), place))
    if raw is None:
        return
    _attempt(mismatches, lambda: AdapterConfig.from_file(path))
    for key, expected in (("r", LORA_RANK), ("lora_alpha", LORA_ALPHA)):
        if raw.get(key) != expected:
            mismatches.append(f"{place}: {key} {raw.get(key)!r}, expected {expected}")
    base = raw.get("base_model_name_or_path")
    # A trainer may have read the base from a folder of the same name.
    if not isinstance(base, str) or base.rstrip("/").rpartition("/")[2] != base_repository.rpartition("/")[2]:
        mismatches.append(f"{place}: base_model_name_or_path {base!r}, expected {base_repository!r}")
    targets = raw.get("target_modules")
    if not _targets_all(targets, config):
        mismatches.append(
            f"{place}: target_modules {targets!r}, expected {sorted((*LANGUAGE_TARGETS, *VISION_TARGETS))}"
        )


def _targets_all(targets: object, config: ModelConfig) -> bool:
    """Do the target modules name the layout's modules: by a list of last names, or by one pattern for the paths?"""
    if isinstance(targets, list):
        return sorted(map(str, targets)) == sorted((*LANGUAGE_TARGETS, *VISION_TARGETS))
    try:
        return isinstance(targets, str) and all(
            re.fullmatch(targets, f"model.{module.module}") for module in lora_modules(config)
        )
    except re.error:
        return False


def _check_tokenizer(
    folder: Path, config: ModelConfig, letter_ids: tuple[int, ...] | None, mismatches: list[str]
) -> None:
    """One token a letter, the image's token where the config says, and no id without a row in the embedding."""
    tokenizer = _attempt(mismatches, lambda: load_tokenizer(folder))
    if tokenizer is None:
        return
    place = f"{folder.name}/{TOKENIZER}"
    for at, letter in enumerate(LETTERS):
        ids = _ids(tokenizer, letter)
        expected = "one token" if letter_ids is None else f"one token, {letter_ids[at]}"
        if len(ids) != 1 or (letter_ids is not None and ids != [letter_ids[at]]):
            mismatches.append(f"{place}: the letter {letter} is {ids}, expected {expected}")
    if _ids(tokenizer, IMAGE_PAD) != [config.image_token_id]:
        mismatches.append(
            f"{place}: {IMAGE_PAD} is {_ids(tokenizer, IMAGE_PAD)}, expected image_token_id of {CONFIG}, "
            f"{config.image_token_id}"
        )
    last_id = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if last_id >= config.text.vocab_size:
        mismatches.append(f"{place}: has the id {last_id}, expected less than vocab_size, {config.text.vocab_size}")


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _check_preprocessor(path: Path, config: ModelConfig, mismatches: list[str]) -> None:
    """The engine prepares images in one way: the file must say the same."""
    place = f"{path.parent.name}/{path.name}"
    raw = _attempt(mismatches, lambda: parse_object(path.read_bytes(), place))
    if raw is None:
        return
    vision = config.vision
    expected = {key: PREPROCESSOR[key] for key in ("size", "image_mean", "image_std")} | {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    mismatches += [
        f"{place}: {key} {raw.get(key)!r}, expected {value!r}"
        for key, value in expected.items()
        if raw.get(key) != value
    ]
