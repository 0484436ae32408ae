"""Loading a checkpoint's published layout into the model: nothing missing, nothing left over.

Three sources: the base (vision tensors only), the adapter (the vision's LoRA pairs, kept in float32) and the export
(the language model with its LoRA merged). The builders name every tensor once. They run first without data, so that
the files' headers show all faults before anything is loaded, then over the files. Layers that read the same rows are
stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from engine.checkpoint.layout import ADAPTER, LANGUAGE, MTP, VISION
from engine.checkpoint.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG
from engine.checkpoint.report import Report, silent
from engine.config import (
    COLOUR_CHANNELS,
    VISION_ROPE_THETA,
    AdapterConfig,
    LayerType,
    ModelConfig,
    TextConfig,
    VisionConfig,
)
from engine.errors import CheckpointError
from engine.model.language import AttentionMixer, DeltaMixer, LanguageModel, Layer
from engine.model.shelves import Plan, Shelf, Take, compare, read_files, read_folder
from engine.model.vision import Affine, Merger, VisionBlock, VisionEncoder
from kernels.lora import AdaptedLinear, LowRank
from kernels.rotary import inverse_frequencies

# In the published files and not used, by rule: the language model comes merged, from the export.
UNUSED_IN_BASE = (LANGUAGE, MTP)
UNUSED_IN_ADAPTER = (f"{ADAPTER}language_model.",)


class Model(NamedTuple):
    """A loaded checkpoint."""

    config: ModelConfig
    vision: VisionEncoder
    language: LanguageModel


def load_model(
    base: Path,
    adapter: Path,
    export: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    report: Report = silent,
) -> Model:
    """Load a checkpoint's three folders straight to a device.

    Args:
        base: the published base: `config.json`, shards and their index.
        adapter: the published adapter, with its `multimodal/` folder.
        export: the merged language model: `model.safetensors`, or shards with an index.
        device: where the tensors go.
        dtype: the model dtype, bfloat16 or float32; the LoRA pairs are float32 always.
        report: told the phase, and the bytes read and to be read.

    Raises:
        CheckpointError: a file is unreadable, or a tensor is missing, left over, or of another shape or dtype; all of
            them are listed, and nothing is loaded.
    """
    assert dtype in (torch.bfloat16, torch.float32), dtype
    device = torch.device(device)
    config = ModelConfig.from_file(base / CONFIG)
    lora = AdapterConfig.from_file(adapter / ADAPTER_CONFIG)
    faults: list[str] = []
    in_base, in_export = read_folder(base, faults), read_folder(export, faults)
    in_adapter = read_files([adapter / ADAPTER_WEIGHTS], faults)
    needs = _needs(config, lora)
    faults += compare("base", needs.base, in_base, UNUSED_IN_BASE, {"BF16", "F32"})
    faults += compare("adapter", needs.adapter, in_adapter, UNUSED_IN_ADAPTER, {"F32"})
    faults += compare("export", needs.export, in_export, (), {"BF16", "F32"})
    if faults:
        raise CheckpointError(faults)
    used = [
        headers[name] for headers, names in zip((in_base, in_adapter, in_export), needs, strict=True) for name in names
    ]
    progress = _Progress(report, sum(header.size_bytes for header in used))
    with (
        Shelf(in_base, device, dtype, progress.add) as from_base,
        Shelf(in_adapter, device, torch.float32, progress.add) as from_adapter,
        Shelf(in_export, device, dtype, progress.add) as from_export,
    ):
        return build_model(config, lora, from_base, from_adapter, from_export, device)


class _Needs(NamedTuple):
    """What the model takes from each source: every tensor's name and shape."""

    base: dict[str, tuple[int, ...]]
    adapter: dict[str, tuple[int, ...]]
    export: dict[str, tuple[int, ...]]


def _needs(config: ModelConfig, lora: AdapterConfig) -> _Needs:
    """By building the model once without data."""
    base, adapter, export = Plan(), Plan(), Plan()
    build_model(config, lora, base, adapter, export, torch.device("meta"))
    return _Needs(base.needed, adapter.needed, export.needed)


class _Progress:
    """Adds up the bytes read and passes them on."""

    def __init__(self, report: Report, total_bytes: int) -> None:
        self._report, self._total_bytes, self._done_bytes = report, total_bytes, 0

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._report("load", self._done_bytes, self._total_bytes)


def build_model(
    config: ModelConfig, lora: AdapterConfig, base: Take, adapter: Take, export: Take, device: torch.device
) -> Model:
    """The model over tensors that are taken by their published names, each once.

    Args:
        config, lora: the sizes.
        base: gives the vision's tensors, model dtype.
        adapter: gives the vision's LoRA pairs, float32.
        export: gives the language model's tensors, merged, model dtype.
        device: where the tensors are.
    """
    vision = _vision(config.vision, lora, base, adapter, device)
    return Model(config, vision, _language(config.text, export, device))


def _vision(
    config: VisionConfig, lora: AdapterConfig, take: Take, take_pair: Take, device: torch.device
) -> VisionEncoder:
    size, mlp = config.hidden_size, config.intermediate_size

    def affine(name: str, outputs: int, *inputs: int) -> Affine:
        weight = take(f"{VISION}{name}.weight", outputs, *inputs)
        return Affine(weight, take(f"{VISION}{name}.bias", outputs))

    def adapted(name: str, outputs: int, inputs: int) -> AdaptedLinear:
        pair = f"{ADAPTER}visual.{name}"
        down = take_pair(f"{pair}.lora_A.weight", lora.rank, inputs)
        up = take_pair(f"{pair}.lora_B.weight", outputs, lora.rank)
        return AdaptedLinear.of(*affine(name, outputs, inputs), LowRank(down, up, lora.scale))

    def block(name: str) -> VisionBlock:
        return VisionBlock(
            norm1=affine(f"{name}.norm1", size),
            qkv=affine(f"{name}.attn.qkv", 3 * size, size),
            proj=affine(f"{name}.attn.proj", size, size),
            norm2=affine(f"{name}.norm2", size),
            fc1=adapted(f"{name}.mlp.linear_fc1", mlp, size),
            fc2=adapted(f"{name}.mlp.linear_fc2", size, mlp),
        )

    kernel = (COLOUR_CHANNELS, config.temporal_patch_size, config.patch_size, config.patch_size)
    patch = affine("patch_embed.proj", size, *kernel)
    return VisionEncoder(
        config=config,
        patch=Affine(patch.weight.flatten(1), patch.bias),
        positions=take(f"{VISION}pos_embed.weight", config.num_position_embeddings, size),
        frequencies=inverse_frequencies(config.head_dim // 2, VISION_ROPE_THETA).to(device),
        blocks=tuple(block(f"blocks.{number}") for number in range(config.depth)),
        merger=Merger(
            norm=affine("merger.norm", size),
            fc1=adapted("merger.linear_fc1", config.merged_size, config.merged_size),
            fc2=adapted("merger.linear_fc2", config.out_hidden_size, config.merged_size),
        ),
    )


def _language(config: TextConfig, take: Take, device: torch.device) -> LanguageModel:
    size, mlp = config.hidden_size, config.intermediate_size

    def layer(kind: LayerType, name: str) -> Layer:
        build = _delta_mixer if kind == "linear_attention" else _attention_mixer
        return Layer(
            input_norm=take(f"{name}.input_layernorm.weight", size),
            mixer=build(config, take, name),
            post_norm=take(f"{name}.post_attention_layernorm.weight", size),
            gate_up=_stack([take(f"{name}.mlp.{part}_proj.weight", mlp, size) for part in ("gate", "up")]),
            down=take(f"{name}.mlp.down_proj.weight", size, mlp),
        )

    return LanguageModel(
        config=config,
        embedding=take(f"{LANGUAGE}embed_tokens.weight", config.vocab_size, size),
        layers=tuple(layer(kind, f"{LANGUAGE}layers.{n}") for n, kind in enumerate(config.layer_types)),
        final_norm=take(f"{LANGUAGE}norm.weight", size),
        frequencies=inverse_frequencies(config.rotary_dims, config.rope_theta).to(device),
    )


def _delta_mixer(config: TextConfig, take: Take, layer: str) -> DeltaMixer:
    name, size, heads = f"{layer}.linear_attn", config.hidden_size, config.linear_num_value_heads
    outputs = {"qkv": config.linear_conv_size, "z": config.linear_value_size, "b": heads, "a": heads}
    conv = take(f"{name}.conv1d.weight", config.linear_conv_size, 1, config.linear_conv_kernel_dim)
    return DeltaMixer(
        config=config,
        in_proj=_stack([take(f"{name}.in_proj_{part}.weight", rows, size) for part, rows in outputs.items()]),
        conv=conv.squeeze(1),
        a_log=take(f"{name}.A_log", heads),
        dt_bias=take(f"{name}.dt_bias", heads),
        norm=take(f"{name}.norm.weight", config.linear_value_head_dim),
        out_proj=take(f"{name}.out_proj.weight", size, config.linear_value_size),
    )


def _attention_mixer(config: TextConfig, take: Take, layer: str) -> AttentionMixer:
    name, size, width = f"{layer}.self_attn", config.hidden_size, config.head_dim
    # The checkpoint stores a query and a gate head by head; the model reads all queries, then all gates.
    q_gate = take(f"{name}.q_proj.weight", 2 * config.attention_size, size)
    queries, gates = q_gate.view(config.num_attention_heads, 2, width, size).unbind(1)
    keys, values = (take(f"{name}.{part}_proj.weight", config.key_value_size, size) for part in ("k", "v"))
    return AttentionMixer(
        config=config,
        in_proj=_stack([queries.flatten(0, 1), gates.flatten(0, 1), keys, values]),
        q_norm=take(f"{name}.q_norm.weight", width),
        k_norm=take(f"{name}.k_norm.weight", width),
        out_proj=take(f"{name}.o_proj.weight", size, config.attention_size),
    )


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Layers that read the same rows, as one: `[outputs, inputs]` on top of one another."""
    if parts[0].is_meta:  # `torch.cat` without data would first import a second's worth of torch
        return parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    return torch.cat(list(parts))
