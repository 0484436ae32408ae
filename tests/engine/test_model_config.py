"""Reading sizes from `config.json` and `adapter_config.json`: strictly, and all faults at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import AdapterConfig, ModelConfig
from engine.errors import CheckpointError
from tests.engine.reference import tiny_config

# Of the published `config.json`: every key that is not only for training or bookkeeping.
PUBLISHED: dict[str, Any] = {
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    },
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def changed(place: str, value: object, raw: dict[str, Any] | None = None) -> dict[str, Any]:
    """A tiny config with the value at a dotted place replaced; `...` takes it out."""
    copied: dict[str, Any] = json.loads(json.dumps(raw or tiny_config()))
    *path, key = place.split(".")
    at = copied
    for step in path:
        at = at[step]
    if value is ...:
        del at[key]
    else:
        at[key] = value
    return copied


def faults(raw: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(raw)
    return caught.value.mismatches


def test_the_published_sizes() -> None:
    config = ModelConfig.from_dict(PUBLISHED)
    text, vision = config.text, config.vision
    assert config.image_token_id == 248056
    assert (text.num_hidden_layers, text.layer_types.count("full_attention")) == (32, 8)
    assert (text.linear_key_size, text.linear_value_size, text.linear_conv_size) == (2048, 4096, 8192)
    assert (text.attention_size, text.key_value_size, text.rotary_dims) == (4096, 1024, 64)
    assert (text.rms_norm_eps, text.rope_theta, text.mrope_section) == (1e-6, 1e7, (11, 11, 10))
    assert (vision.head_dim, vision.patch_values, vision.merged_patches, vision.merged_size) == (64, 1536, 4, 4096)


def test_training_and_bookkeeping_keys_are_passed_over() -> None:
    for key in ("dtype", "initializer_range", "use_cache", "eos_token_id"):
        assert ModelConfig.from_dict(changed(f"text_config.{key}", "anything")) == ModelConfig.from_dict(tiny_config())


UNSUPPORTED = [
    ("model_type", "qwen3_vl"),
    ("tie_word_embeddings", False),
    ("text_config.tie_word_embeddings", False),
    ("text_config.hidden_act", "gelu"),
    ("text_config.attention_bias", True),
    ("text_config.attn_output_gate", False),
    ("text_config.mamba_ssm_dtype", "bfloat16"),
    ("text_config.mlp_only_layers", [1]),
    ("text_config.num_experts", 8),
    ("text_config.layer_types", ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]),
    ("text_config.layer_types", ["linear_attention"]),
    ("text_config.rope_parameters.rope_type", "yarn"),
    ("text_config.rope_parameters.mrope_interleaved", False),
    ("text_config.rope_parameters.factor", 4.0),
    ("text_config.rope_parameters.mrope_section", [4, 4]),
    ("vision_config.hidden_act", "gelu"),
    ("vision_config.in_channels", 4),
    ("vision_config.deepstack_visual_indexes", [1]),
    ("vision_config.window_size", 7),
    ("quantization_config", {}),
]
WRONG = [
    ("image_token_id", ...),
    ("text_config", ...),
    ("text_config.hidden_size", "64"),
    ("text_config.hidden_size", 0),
    ("text_config.vocab_size", True),
    ("text_config.rms_norm_eps", 0),
    ("text_config.rope_parameters.rope_theta", "1e7"),
    ("text_config.linear_conv_kernel_dim", 1),
    ("vision_config.depth", ...),
    ("vision_config.depth", 2.0),
]


@pytest.mark.parametrize("place, value", [*UNSUPPORTED, *WRONG])
def test_a_fault_names_its_place_and_what_was_found(place: str, value: object) -> None:
    found = faults(changed(place, value))
    key = place.rpartition(".")[2]
    assert any(f"{key} is missing" in fault if value is ... else f"{key} is {value!r}" in fault for fault in found), (
        found
    )


DISAGREEING = [
    ("vision_config.num_heads", 5, "num_heads"),
    ("vision_config.num_heads", 32, "multiple of 4"),
    ("vision_config.num_position_embeddings", 2305, "square"),
    ("vision_config.out_hidden_size", 96, "out_hidden_size"),
    ("text_config.num_key_value_heads", 3, "key-value heads"),
    ("text_config.linear_num_key_heads", 3, "value heads"),
    ("text_config.rope_parameters.partial_rotary_factor", 0.41, "even part"),
    ("text_config.rope_parameters.partial_rotary_factor", 2.0, "even part"),
    ("text_config.rope_parameters.mrope_section", [4, 2, 3], "sum to 8"),
    ("text_config.rope_parameters.mrope_section", [1, 4, 3], "interleaved"),
]


@pytest.mark.parametrize("place, value, sentence", DISAGREEING)
def test_sizes_that_cannot_stand_together(place: str, value: object, sentence: str) -> None:
    assert any(sentence in fault for fault in faults(changed(place, value)))


def test_all_faults_are_named_at_once() -> None:
    raw = changed("text_config.hidden_act", "gelu", changed("vision_config.depth", ..., changed("unheard_of", 1)))
    found = faults(raw)
    assert len(found) == 3
    for part in ("text_config: hidden_act", "vision_config: depth", "unheard_of"):
        assert any(part in fault for fault in found)


@pytest.mark.parametrize("contents", (None, b"{", b"[]", b"\xff"))
def test_an_unreadable_file(contents: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if contents is not None:
        file.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_file(file)


def adapter(tmp_path: Path, **settings: object) -> AdapterConfig:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "r": 16, "lora_alpha": 32, "bias": "none", **settings}))
    return AdapterConfig.from_file(file)


def test_the_adapters_rank_and_scale(tmp_path: Path) -> None:
    assert adapter(tmp_path, target_modules="anything", use_dora=False) == AdapterConfig(rank=16, scale=2.0)
    assert adapter(tmp_path, r=8, lora_alpha=2).scale == 0.25


@pytest.mark.parametrize(
    "key, value",
    [
        ("peft_type", "LOHA"),
        ("r", 0),
        ("lora_alpha", None),
        ("bias", "all"),
        ("use_dora", True),
        ("use_rslora", True),
        ("fan_in_fan_out", True),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("modules_to_save", ["lm_head"]),
    ],
)
def test_more_than_plain_lora_is_refused(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        adapter(tmp_path, **{key: value})
    assert len(caught.value.mismatches) == 1
    assert f"{key} is {value!r}" in caught.value.mismatches[0]
