"""The published sizes give the published layout: names, shapes, counts, file sizes. Only headers are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from engine.checkpoint.layout import (
    BF16,
    LANGUAGE,
    MTP,
    VISION,
    adapter_tensors,
    base_tensors,
    language_tensors,
    lora_modules,
)
from engine.checkpoint.sizes import model_config
from engine.checkpoint.synthesize import TensorFiles, plan_tensor_files
from engine.config import ModelConfig

BASE_TENSORS = 738
ADAPTER_BYTES = 101_665_112
PUBLISHED_BASE_BYTES = 5_329_398_688 + 3_990_429_408
INDEX_BYTES = 76_196


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_dict(model_config("full"))


@pytest.fixture(scope="module")
def planned() -> TensorFiles:
    return plan_tensor_files(model_config("full"))


def test_the_full_config_has_the_published_sizes(config: ModelConfig) -> None:
    text, vision = config.text, config.vision
    assert (text.hidden_size, text.intermediate_size, text.vocab_size) == (2560, 9216, 248_320)
    assert Counter(text.layer_types) == {"linear_attention": 24, "full_attention": 8}
    assert all((kind == "full_attention") == (at % 4 == 3) for at, kind in enumerate(text.layer_types))
    assert (text.num_attention_heads, text.num_key_value_heads, text.head_dim) == (16, 4, 256)
    assert (text.rotary_dims, text.mrope_section, text.rope_theta) == (64, (11, 11, 10), 1e7)
    assert (text.linear_num_key_heads, text.linear_num_value_heads, text.linear_key_head_dim) == (16, 32, 128)
    assert (vision.depth, vision.hidden_size, vision.intermediate_size, vision.num_heads) == (24, 1024, 4096, 16)
    assert (vision.out_hidden_size, vision.num_position_embeddings, config.image_token_id) == (2560, 2304, 248_056)


def test_the_base_has_738_tensors(config: ModelConfig) -> None:
    names = [spec.name for spec in base_tensors(config, mtp_layers=1)]
    assert len(set(names)) == len(names) == BASE_TENSORS
    assert Counter(next(p for p in (LANGUAGE, VISION, MTP) if name.startswith(p)) for name in names) == {
        LANGUAGE: 426,
        VISION: 297,
        MTP: 15,
    }


SHAPES: Mapping[str, tuple[int, ...]] = {
    "model.language_model.embed_tokens.weight": (248_320, 2560),
    "model.language_model.layers.0.linear_attn.in_proj_qkv.weight": (8192, 2560),
    "model.language_model.layers.0.linear_attn.in_proj_a.weight": (32, 2560),
    "model.language_model.layers.0.linear_attn.conv1d.weight": (8192, 1, 4),
    "model.language_model.layers.30.linear_attn.norm.weight": (128,),
    "model.language_model.layers.30.linear_attn.out_proj.weight": (2560, 4096),
    "model.language_model.layers.31.self_attn.q_proj.weight": (8192, 2560),
    "model.language_model.layers.31.self_attn.k_proj.weight": (1024, 2560),
    "model.language_model.layers.31.self_attn.o_proj.weight": (2560, 4096),
    "model.language_model.layers.31.self_attn.q_norm.weight": (256,),
    "model.language_model.layers.31.mlp.down_proj.weight": (2560, 9216),
    "model.language_model.norm.weight": (2560,),
    "model.visual.patch_embed.proj.weight": (1024, 3, 2, 16, 16),
    "model.visual.pos_embed.weight": (2304, 1024),
    "model.visual.blocks.23.attn.qkv.bias": (3072,),
    "model.visual.blocks.23.mlp.linear_fc1.weight": (4096, 1024),
    "model.visual.merger.norm.weight": (1024,),
    "model.visual.merger.linear_fc1.weight": (4096, 4096),
    "model.visual.merger.linear_fc2.weight": (2560, 4096),
    "mtp.fc.weight": (2560, 5120),
    "mtp.layers.0.self_attn.v_proj.weight": (1024, 2560),
}


def test_tensors_have_the_published_shapes(config: ModelConfig) -> None:
    found = {spec.name: spec.shape for spec in base_tensors(config, mtp_layers=1)}
    assert {name: found.get(name) for name in SHAPES} == SHAPES


def test_only_two_tensors_of_a_delta_rule_layer_are_published_in_float32(config: ModelConfig) -> None:
    wide = [spec.name for spec in base_tensors(config, mtp_layers=1) if spec.dtypes != BF16]
    assert len(wide) == 48
    assert {name.rpartition(".linear_attn.")[2] for name in wide} == {"A_log", "norm.weight"}


def test_a_base_without_prediction_layers_is_the_rest(config: ModelConfig) -> None:
    assert len(base_tensors(config, mtp_layers=0)) == BASE_TENSORS - 15


def test_the_adapter_has_178_pairs_of_which_50_are_vision(config: ModelConfig) -> None:
    modules = lora_modules(config)
    assert (len(modules), sum(module.is_vision for module in modules)) == (178, 50)
    names = Counter(module.module.rpartition(".")[2] for module in modules)
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), 8)
    mlp = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 32)
    assert names == attention | mlp | {"linear_fc1": 25, "linear_fc2": 25}
    assert len(adapter_tensors(config)) == 356


def test_a_pair_belongs_to_a_tensor_of_the_base(config: ModelConfig) -> None:
    shapes = {spec.name: spec.shape for spec in base_tensors(config, mtp_layers=0)}
    for module in lora_modules(config):
        assert shapes[module.weight_name] == (module.outputs, module.inputs)
    first = lora_modules(config)[0]
    assert first.a_name == "base_model.model.model.language_model.layers.0.mlp.gate_proj.lora_A.weight"


def test_the_full_files_have_the_published_sizes_and_names(planned: TensorFiles) -> None:
    assert list(planned.plans) == [
        "base/model.safetensors-00001-of-00002.safetensors",
        "base/model.safetensors-00002-of-00002.safetensors",
        "adapter/multimodal/adapter_model.safetensors",
    ]
    first, second, adapter = planned.plans.values()
    assert adapter.size_bytes == ADAPTER_BYTES
    assert len(first.tensors) + len(second.tensors) == BASE_TENSORS
    # The published split between the shards is not known; another moves a few digits of the headers' offsets.
    assert abs(first.size_bytes + second.size_bytes - PUBLISHED_BASE_BYTES) < 1000
    assert len(planned.index) == INDEX_BYTES


def test_the_export_holds_the_language_model_alone(config: ModelConfig) -> None:
    names = {spec.name for spec in language_tensors(config.text)}
    assert len(names) == 426
    assert all(name.startswith(LANGUAGE) for name in names)
