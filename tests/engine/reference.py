"""Tiny checkpoints in the published layout, and the correctness reference over them: Transformers and PEFT.

Weights follow the contract's recipe for random weights, so that differences between implementations show.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.utils import logging

logging.disable_progress_bar()

Tensors = dict[str, torch.Tensor]

RANK, ALPHA = 4, 8
VOCAB_SIZE = 300
IMAGE_TOKEN_ID = 299
LETTER_IDS = tuple(range(32, 58))
LORA_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("linear_fc1", "linear_fc2"),
)
EXPORT_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"


def tiny_config(text: Mapping[str, object] = {}, vision: Mapping[str, object] = {}) -> dict[str, object]:
    """A `config.json` of the published form with small sizes; `text` and `vision` overwrite some of them."""
    layers = int(str(text.get("num_hidden_layers", 4)))
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": VOCAB_SIZE - 2,
        "vision_start_token_id": VOCAB_SIZE - 4,
        "vision_end_token_id": VOCAB_SIZE - 3,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_5_text",
            "attention_bias": False,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "hidden_size": 64,
            "intermediate_size": 96,
            "vocab_size": VOCAB_SIZE,
            "num_hidden_layers": layers,
            "layer_types": ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(layers)],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "mamba_ssm_dtype": "float32",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
                "rope_theta": 10_000_000,
                "partial_rotary_factor": 0.5,
            },
            **text,
        },
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "in_channels": 3,
            "intermediate_size": 112,
            "num_heads": 4,
            "num_position_embeddings": 2304,
            "out_hidden_size": 64,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [],
            **vision,
        },
    }


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint's three folders and the config they were made with."""

    base: Path
    adapter: Path
    export: Path
    config: dict[str, object]


def write_checkpoint(folder: Path, config: dict[str, object], seed: int, export_dtype: torch.dtype) -> TinyCheckpoint:
    """Write base (two shards and an index), adapter and merged export; `export_dtype` is the merged weights' dtype."""
    paths = TinyCheckpoint(folder / "base", folder / "adapter", folder / "export", config)
    for part in (paths.base, paths.adapter, paths.export):
        part.mkdir(parents=True)
    (paths.base / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    base = _base_tensors(config, generator)
    adapter = _adapter_tensors(base, generator)
    _write_shards(paths.base, {**base, "mtp.norm.weight": torch.zeros(8, dtype=torch.bfloat16)})
    multimodal = paths.adapter / "multimodal"
    multimodal.mkdir()
    save_file(adapter, multimodal / ADAPTER_FILE)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(LORA_MODULES)}
    (multimodal / "adapter_config.json").write_text(json.dumps({**settings, "lora_dropout": 0.05, "bias": "none"}))
    save_file(_merged_language(base, adapter, export_dtype), paths.export / EXPORT_FILE)
    return paths


def read_tensors(file: Path) -> Tensors:
    """All of a safetensors file, in memory of its own, so that the file can be rewritten."""
    tensors: Tensors = load(file.read_bytes())
    return tensors


def edit_tensors(file: Path, changed: Mapping[str, torch.Tensor | None]) -> None:
    """Rewrite a safetensors file with some tensors changed, added, or (None) taken out."""
    tensors = {**read_tensors(file), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def scale_tensors(file: Path, name: str, factor: float) -> None:
    """Rewrite a safetensors file with one of its tensors multiplied, if it is there."""
    tensors = read_tensors(file)
    if name in tensors:
        edit_tensors(file, {name: tensors[name] * factor})


def rewrite_export(checkpoint: TinyCheckpoint, factor: float) -> None:
    """Merge again, in float32, with the adapter's part multiplied."""
    base: Tensors = {}
    for shard in checkpoint.base.glob("*.safetensors"):
        base |= read_tensors(shard)
    adapter = read_tensors(checkpoint.adapter / "multimodal" / ADAPTER_FILE)
    scaled = {name: tensor * (factor if "lora_B" in name else 1.0) for name, tensor in adapter.items()}
    save_file(_merged_language(base, scaled, torch.float32), checkpoint.export / EXPORT_FILE)


def load_reference(checkpoint: TinyCheckpoint, dtype: torch.dtype) -> PeftModel:
    """Transformers over the base with PEFT's unmerged, float32 adapter over all its modules."""
    config = Qwen3_5Config(**copy.deepcopy(checkpoint.config))
    model, loading = Qwen3_5ForConditionalGeneration.from_pretrained(
        checkpoint.base, config=config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["mismatched_keys"], loading
    return PeftModel.from_pretrained(model, checkpoint.adapter / "multimodal").eval()


def _base_tensors(config: dict[str, object], generator: torch.Generator) -> Tensors:
    """All of the base's tensors in BF16, but the two that the published files hold in float32."""
    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**copy.deepcopy(config)))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors = {name: _random_tensor(name, shape, generator) for name, shape in shapes.items()}
    wide = ("A_log", "linear_attn.norm.weight")
    return {
        name: tensor.to(torch.float32 if name.endswith(wide) else torch.bfloat16) for name, tensor in tensors.items()
    }


def _random_tensor(name: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(*shape, generator=generator)
    if name.endswith("A_log"):
        return torch.empty(*shape).uniform_(0.01, 16, generator=generator).log()
    if name.endswith("dt_bias"):
        return noise * 2 - 4
    if name.endswith("embed_tokens.weight"):
        # The recipe's 0.04 is for a width of 2560; scaled so that logits spread as they do there.
        return noise * 0.04 * math.sqrt(2560 / shape[1])
    if name.endswith("pos_embed.weight"):
        return noise * 0.2
    if name.endswith("bias"):
        return noise * 0.1
    if len(shape) == 1:  # a norm: `1 + weight` in the language model, but for the delta rule's plain one
        plain = "visual" in name or "linear_attn.norm" in name
        return noise * 0.1 + (1.0 if plain else 0.0)
    return noise / math.sqrt(math.prod(shape[1:]))


def _adapter_tensors(base: Tensors, generator: torch.Generator) -> Tensors:
    tensors: Tensors = {}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or module.rpartition(".")[2] not in LORA_MODULES:
            continue
        outputs, inputs = weight.shape
        down = torch.randn(RANK, inputs, generator=generator) / math.sqrt(inputs)
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.02
    return tensors


def _merged_language(base: Tensors, adapter: Tensors, dtype: torch.dtype) -> Tensors:
    merged: Tensors = {}
    for name, weight in base.items():
        if not name.startswith("model.language_model."):
            continue
        pair = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{pair}.lora_A.weight" in adapter:
            product = adapter[f"{pair}.lora_B.weight"] @ adapter[f"{pair}.lora_A.weight"]
            merged[name] = (weight.float() + ALPHA / RANK * product).to(dtype)
        else:
            merged[name] = weight
    return merged


def _write_shards(folder: Path, tensors: Tensors) -> None:
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    weight_map = {}
    for number, half in enumerate(halves, start=1):
        file = f"model.safetensors-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file)
        weight_map |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
