"""What the files of a checkpoint hold: every tensor's name, shape and dtype, derived from the sizes in its config.

Names are the published ones (Transformers' `Qwen3_5ForConditionalGeneration`, PEFT's LoRA). It reads no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.config import ModelConfig, TextConfig, VisionConfig

LANGUAGE = "model.language_model."
VISION = "model.visual."
MTP = "mtp."
ADAPTER = "base_model.model.model."

# The adapter that this layout merges and runs: rank 16, alpha 32.
LORA_RANK = 16
LORA_ALPHA = 32
LANGUAGE_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VISION_TARGETS = ("linear_fc1", "linear_fc2")

BF16 = ("BF16",)
F32 = ("F32",)
# Published in float32 inside a BF16 checkpoint; computed in the model's dtype all the same.
F32_OR_BF16 = ("F32", "BF16")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that must be there: `dtypes` (safetensors' names) are allowed, the first is what is written."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = BF16


@dataclass(frozen=True)
class LoraModule:
    """A linear module with a LoRA pair: `A [rank, inputs]`, `B [outputs, rank]`, both float32.

    `module` is its path below `model.`: `language_model.layers.3.self_attn.q_proj`.
    """

    module: str
    outputs: int
    inputs: int

    @property
    def is_vision(self) -> bool:
        """Vision pairs stay apart; language pairs are merged at export."""
        return self.module.startswith("visual.")

    @property
    def weight_name(self) -> str:
        """The base tensor that the pair belongs to."""
        return f"model.{self.module}.weight"

    @property
    def a_name(self) -> str:
        """The adapter's tensor A."""
        return f"{ADAPTER}{self.module}.lora_A.weight"

    @property
    def b_name(self) -> str:
        """The adapter's tensor B."""
        return f"{ADAPTER}{self.module}.lora_B.weight"


def base_tensors(config: ModelConfig, mtp_layers: int) -> tuple[TensorSpec, ...]:
    """Every tensor of the base: language, vision and the `mtp_layers` unused prediction layers."""
    return (*language_tensors(config.text), *vision_tensors(config.vision), *_mtp_tensors(config.text, mtp_layers))


def language_tensors(text: TextConfig) -> tuple[TensorSpec, ...]:
    """The language model's tensors; the export holds these and no others."""
    specs = [TensorSpec(f"{LANGUAGE}embed_tokens.weight", (text.vocab_size, text.hidden_size))]
    for index, kind in enumerate(text.layer_types):
        prefix = f"{LANGUAGE}layers.{index}."
        specs += _delta_rule(text, prefix) if kind == "linear_attention" else _attention(text, prefix)
        specs += _mlp_and_norms(text, prefix)
    specs.append(TensorSpec(f"{LANGUAGE}norm.weight", (text.hidden_size,)))
    return tuple(specs)


def vision_tensors(vision: VisionConfig) -> tuple[TensorSpec, ...]:
    """The vision encoder's tensors."""
    width = vision.hidden_size
    patch = (width, 3, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    specs = [
        *_linear(f"{VISION}patch_embed.proj", patch),
        TensorSpec(f"{VISION}pos_embed.weight", (vision.num_position_embeddings, width)),
    ]
    for index in range(vision.depth):
        prefix = f"{VISION}blocks.{index}."
        specs += [
            *_linear(f"{prefix}attn.qkv", (3 * width, width)),
            *_linear(f"{prefix}attn.proj", (width, width)),
            *_linear(f"{prefix}mlp.linear_fc1", (vision.intermediate_size, width)),
            *_linear(f"{prefix}mlp.linear_fc2", (width, vision.intermediate_size)),
            *_linear(f"{prefix}norm1", (width,)),
            *_linear(f"{prefix}norm2", (width,)),
        ]
    specs += [
        *_linear(f"{VISION}merger.norm", (width,)),
        *_linear(f"{VISION}merger.linear_fc1", (vision.merged_size, vision.merged_size)),
        *_linear(f"{VISION}merger.linear_fc2", (vision.out_hidden_size, vision.merged_size)),
    ]
    return tuple(specs)


def lora_modules(config: ModelConfig) -> tuple[LoraModule, ...]:
    """Every module that the adapter must have a pair for."""
    shapes = {spec.name: spec.shape for spec in (*language_tensors(config.text), *vision_tensors(config.vision))}
    return tuple(_lora_modules(shapes))


def adapter_tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of the adapter."""
    return tuple(
        spec
        for module in lora_modules(config)
        for spec in (
            TensorSpec(module.a_name, (LORA_RANK, module.inputs), F32),
            TensorSpec(module.b_name, (module.outputs, LORA_RANK), F32),
        )
    )


def mtp_layer_count(raw_config: Mapping[str, object]) -> int:
    """How many unused multi-token prediction layers a `config.json` announces; 0 when it names none."""
    text = raw_config.get("text_config")
    count = text.get("mtp_num_hidden_layers", 0) if isinstance(text, dict) else 0
    return count if type(count) is int and count > 0 else 0


def _lora_modules(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[LoraModule]:
    for name, shape in shapes.items():
        path, _, kind = name.rpartition(".")
        targets = VISION_TARGETS if name.startswith(VISION) else LANGUAGE_TARGETS
        if kind == "weight" and path.rpartition(".")[2] in targets:
            outputs, inputs = shape
            yield LoraModule(path.removeprefix("model."), outputs, inputs)


def _linear(name: str, shape: tuple[int, ...]) -> tuple[TensorSpec, TensorSpec]:
    """A weight and the bias that goes with it."""
    return TensorSpec(f"{name}.weight", shape), TensorSpec(f"{name}.bias", shape[:1])


def _attention(text: TextConfig, prefix: str) -> list[TensorSpec]:
    """Full attention; the query projection also makes the output gate, hence twice its width."""
    hidden, at = text.hidden_size, f"{prefix}self_attn."
    return [
        TensorSpec(f"{at}q_proj.weight", (2 * text.attention_size, hidden)),
        TensorSpec(f"{at}k_proj.weight", (text.key_value_size, hidden)),
        TensorSpec(f"{at}v_proj.weight", (text.key_value_size, hidden)),
        TensorSpec(f"{at}o_proj.weight", (hidden, text.attention_size)),
        TensorSpec(f"{at}q_norm.weight", (text.head_dim,)),
        TensorSpec(f"{at}k_norm.weight", (text.head_dim,)),
    ]


def _delta_rule(text: TextConfig, prefix: str) -> list[TensorSpec]:
    hidden, heads, at = text.hidden_size, text.linear_num_value_heads, f"{prefix}linear_attn."
    return [
        TensorSpec(f"{at}in_proj_qkv.weight", (text.linear_conv_size, hidden)),
        TensorSpec(f"{at}in_proj_z.weight", (text.linear_value_size, hidden)),
        TensorSpec(f"{at}in_proj_b.weight", (heads, hidden)),
        TensorSpec(f"{at}in_proj_a.weight", (heads, hidden)),
        TensorSpec(f"{at}conv1d.weight", (text.linear_conv_size, 1, text.linear_conv_kernel_dim)),
        TensorSpec(f"{at}dt_bias", (heads,)),
        TensorSpec(f"{at}A_log", (heads,), F32_OR_BF16),
        TensorSpec(f"{at}norm.weight", (text.linear_value_head_dim,), F32_OR_BF16),
        TensorSpec(f"{at}out_proj.weight", (hidden, text.linear_value_size)),
    ]


def _mlp_and_norms(text: TextConfig, prefix: str) -> list[TensorSpec]:
    hidden, inner = text.hidden_size, text.intermediate_size
    return [
        TensorSpec(f"{prefix}mlp.gate_proj.weight", (inner, hidden)),
        TensorSpec(f"{prefix}mlp.up_proj.weight", (inner, hidden)),
        TensorSpec(f"{prefix}mlp.down_proj.weight", (hidden, inner)),
        TensorSpec(f"{prefix}input_layernorm.weight", (hidden,)),
        TensorSpec(f"{prefix}post_attention_layernorm.weight", (hidden,)),
    ]


def _mtp_tensors(text: TextConfig, layers: int) -> list[TensorSpec]:
    if layers == 0:
        return []
    hidden = text.hidden_size
    specs = [TensorSpec(f"{MTP}fc.weight", (hidden, 2 * hidden))]
    specs += [
        TensorSpec(f"{MTP}{norm}.weight", (hidden,)) for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    ]
    for index in range(layers):
        prefix = f"{MTP}layers.{index}."
        specs += [*_attention(text, prefix), *_mlp_and_norms(text, prefix)]
    return specs
