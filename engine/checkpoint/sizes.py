"""The sizes in which synthetic checkpoints come, as `config.json` and `preprocessor_config.json` contents.

`full` has the published checkpoint's sizes; `tiny` the same structure, the whole vocabulary (so that real prompts run)
and everything else as small as the structure allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Size = Literal["tiny", "full"]

PREPROCESSOR: Mapping[str, object] = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


@dataclass(frozen=True)
class _Numbers:
    """What differs between the sizes; the names are those of `config.json`, `vision_*` of its vision part."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mrope_section: tuple[int, int, int]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_head_dim: int
    vision_depth: int
    vision_hidden_size: int
    vision_intermediate_size: int
    vision_num_heads: int


_NUMBERS: Mapping[Size, _Numbers] = {
    "full": _Numbers(
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        mrope_section=(11, 11, 10),
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_head_dim=128,
        vision_depth=24,
        vision_hidden_size=1024,
        vision_intermediate_size=4096,
        vision_num_heads=16,
    ),
    "tiny": _Numbers(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mrope_section=(3, 3, 2),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_head_dim=32,
        vision_depth=3,
        vision_hidden_size=64,
        vision_intermediate_size=128,
        vision_num_heads=4,
    ),
}
_FULL_ATTENTION_EVERY = 4


def model_config(size: Size) -> dict[str, object]:
    """The contents of `config.json`."""
    numbers = _NUMBERS[size]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "image_token_id": 248_056,
        "video_token_id": 248_057,
        "vision_start_token_id": 248_053,
        "vision_end_token_id": 248_054,
        "text_config": _text(numbers),
        "vision_config": _vision(numbers),
    }


def _text(numbers: _Numbers) -> dict[str, object]:
    layers = range(1, numbers.num_hidden_layers + 1)
    return {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 248_320,
        "eos_token_id": 248_044,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "initializer_range": 0.02,
        "max_position_embeddings": 262_144,
        "hidden_size": numbers.hidden_size,
        "intermediate_size": numbers.intermediate_size,
        "num_hidden_layers": numbers.num_hidden_layers,
        "full_attention_interval": _FULL_ATTENTION_EVERY,
        "layer_types": ["linear_attention" if layer % _FULL_ATTENTION_EVERY else "full_attention" for layer in layers],
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_attention_heads": numbers.num_attention_heads,
        "num_key_value_heads": numbers.num_key_value_heads,
        "head_dim": numbers.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": list(numbers.mrope_section),
        },
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": numbers.linear_num_key_heads,
        "linear_num_value_heads": numbers.linear_num_value_heads,
        "linear_key_head_dim": numbers.linear_head_dim,
        "linear_value_head_dim": numbers.linear_head_dim,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "use_cache": True,
    }


def _vision(numbers: _Numbers) -> dict[str, object]:
    return {
        "model_type": "qwen3_5",
        "depth": numbers.vision_depth,
        "hidden_size": numbers.vision_hidden_size,
        "intermediate_size": numbers.vision_intermediate_size,
        "num_heads": numbers.vision_num_heads,
        "out_hidden_size": numbers.hidden_size,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "initializer_range": 0.02,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [],
    }
