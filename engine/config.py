"""The sizes of a checkpoint, read from its `config.json` and `adapter_config.json` and from nowhere else.

The files are read strictly: a value that this engine does not compute, and a key that it does not know, are errors,
since either could mean another model. Every fault of a file is named at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from engine.errors import CheckpointError

LayerType = Literal["linear_attention", "full_attention"]

# The architecture's constants that no file states.
VISION_ROPE_THETA = 10_000.0
LAYER_NORM_EPS = 1e-6
COLOUR_CHANNELS = 3

# Keys that change training, generation or bookkeeping, but not the one pass this engine runs.
_IGNORED = frozenset(
    (
        *("architectures", "dtype", "torch_dtype", "model_type", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
        *("video_token_id", "vision_start_token_id", "vision_end_token_id"),
        *("attention_dropout", "initializer_range", "max_position_embeddings", "use_cache"),
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        "full_attention_interval",  # `layer_types` says it in full
    )
)


@dataclass(frozen=True)
class VisionConfig:
    """The vision encoder.

    `depth` blocks of width `hidden_size` with `num_heads` heads; patches of `temporal_patch_size` frames of
    `patch_size` pixels a side; `spatial_merge_size` squared patches become one token of width `out_hidden_size`; a
    square table of `num_position_embeddings` learned positions.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_position_embeddings: int
    out_hidden_size: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Pixel values of a patch: channels x frames x rows x columns."""
        return COLOUR_CHANNELS * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_patches(self) -> int:
        """Patches that become one token."""
        return self.spatial_merge_size**2

    @property
    def merged_size(self) -> int:
        """Width of a token before the merger's projection."""
        return self.hidden_size * self.merged_patches


@dataclass(frozen=True)
class TextConfig:
    """The language model: its layers, in order, are `layer_types`; the embedding is tied to the read-out.

    `linear_*` are the gated delta rule's heads and convolution; `num_attention_heads`, `num_key_value_heads` and
    `head_dim` those of full attention; `rotary_dims` of each head turn with the position, on the three axes by
    `mrope_section`.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dims: int
    mrope_section: tuple[int, int, int]

    @property
    def num_hidden_layers(self) -> int:
        """How many layers there are."""
        return len(self.layer_types)

    @property
    def linear_key_size(self) -> int:
        """Width of all of the delta rule's queries, or of all its keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_size(self) -> int:
        """Width of all of the delta rule's values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.linear_key_size + self.linear_value_size

    @property
    def attention_size(self) -> int:
        """Width of all query heads of full attention."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads of full attention, or of all its values."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class ModelConfig:
    """A whole model; `image_token_id` stands for each of the image's tokens in a prompt."""

    text: TextConfig
    vision: VisionConfig
    image_token_id: int

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read a `config.json`.

        Raises:
            CheckpointError: it cannot be read, or `from_dict` refuses it.
        """
        return cls.from_dict(_read_json(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> ModelConfig:
        """Read the contents of a `config.json`.

        Raises:
            CheckpointError: a value is missing, of the wrong kind, unknown to this engine or at odds with another; all
                of them are listed.
        """
        faults: list[str] = []
        top = _Section(raw, "config.json", faults)
        top.fixed("model_type", "qwen3_5")
        top.fixed("tie_word_embeddings", True)
        image_token_id = top.count("image_token_id", least=0)
        text = _text(top.section("text_config"))
        vision = _vision(top.section("vision_config"))
        top.finish()
        if not faults:
            faults += _disagreements(text, vision)
        if faults:
            raise CheckpointError(faults)
        return cls(text, vision, image_token_id)


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter: the rank of its pairs, and the `scale` of their products."""

    rank: int
    scale: float

    @classmethod
    def from_file(cls, path: Path) -> AdapterConfig:
        """Read an `adapter_config.json` as PEFT writes it.

        Raises:
            CheckpointError: it cannot be read, or asks for more than plain LoRA; every fault is listed.
        """
        faults: list[str] = []
        section = _Section(_read_json(path), path.name, faults)
        rank = section.count("r")
        alpha = section.number("lora_alpha")
        section.fixed("peft_type", "LORA")
        section.fixed("bias", "none", may_be_absent=True)
        for key in ("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora"):
            section.empty(key)
        for key in ("rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "target_parameters"):
            section.empty(key)
        for key in ("trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config"):
            section.empty(key)
        if faults:
            raise CheckpointError(faults)
        return cls(rank, alpha / rank)


class _Section:
    """A JSON object being read: every key taken is ticked off, every fault is noted and reading goes on."""

    def __init__(self, raw: Mapping[str, object], name: str, faults: list[str]) -> None:
        self._raw, self._name, self._faults = raw, name, faults
        self._known = set(_IGNORED)

    def section(self, key: str) -> _Section:
        value = self._take(key)
        if not isinstance(value, dict):
            self._fault(key, value, "an object is needed")
            value = {}
        return _Section(value, f"{self._name}: {key}", self._faults)

    def count(self, key: str, least: int = 1) -> int:
        value = self._take(key)
        if type(value) is not int or value < least:
            self._fault(key, value, f"an integer of at least {least} is needed")
            return max(least, 1)
        return value

    def number(self, key: str) -> float:
        value = self._take(key)
        if type(value) not in (int, float) or not 0 < cast(float, value) < math.inf:
            self._fault(key, value, "a positive number is needed")
            return 1.0
        return float(cast(float, value))

    def sequence(self, key: str) -> list[object]:
        value = self._take(key)
        if not isinstance(value, list):
            self._fault(key, value, "a list is needed")
            return []
        return value

    def fixed(self, key: str, only: object, may_be_absent: bool = False) -> None:
        """A value that this engine computes in one way only."""
        value = self._take(key)
        absent = may_be_absent and key not in self._raw
        if not absent and (type(value) is not type(only) or value != only):
            self._fault(key, value, f"this engine computes only {only!r}")

    def empty(self, key: str) -> None:
        """A feature that must be off: absent, null, false or empty."""
        value = self._take(key)
        if value:
            self._fault(key, value, "this engine does not compute it; it must be off")

    def finish(self) -> None:
        """Note every key that nobody asked for."""
        for key in sorted(set(self._raw) - self._known):
            self._fault(key, self._raw[key], "this engine does not know this key")

    def _take(self, key: str) -> object:
        self._known.add(key)
        return self._raw.get(key)

    def _fault(self, key: str, value: object, sentence: str) -> None:
        found = f"is {value!r}" if key in self._raw else "is missing"
        self._faults.append(f"{self._name}: {key} {found}; {sentence}")


def _vision(section: _Section) -> VisionConfig:
    section.fixed("hidden_act", "gelu_pytorch_tanh")
    section.fixed("in_channels", COLOUR_CHANNELS)
    section.empty("deepstack_visual_indexes")
    config = VisionConfig(
        depth=section.count("depth"),
        hidden_size=section.count("hidden_size"),
        intermediate_size=section.count("intermediate_size"),
        num_heads=section.count("num_heads"),
        num_position_embeddings=section.count("num_position_embeddings"),
        out_hidden_size=section.count("out_hidden_size"),
        patch_size=section.count("patch_size"),
        spatial_merge_size=section.count("spatial_merge_size"),
        temporal_patch_size=section.count("temporal_patch_size"),
    )
    section.finish()
    return config


def _text(section: _Section) -> TextConfig:
    section.fixed("hidden_act", "silu")
    section.fixed("attn_output_gate", True)
    section.fixed("tie_word_embeddings", True)
    section.fixed("mamba_ssm_dtype", "float32", may_be_absent=True)
    section.empty("attention_bias")
    section.empty("mlp_only_layers")
    layers = section.count("num_hidden_layers")
    layer_types = section.sequence("layer_types")
    known = ("linear_attention", "full_attention")
    if len(layer_types) != layers or any(kind not in known for kind in layer_types):
        section._fault("layer_types", layer_types, f"{layers} entries of {' or '.join(known)} are needed")
    head_dim = section.count("head_dim")
    rope = section.section("rope_parameters")
    rope.fixed("rope_type", "default")
    rope.fixed("mrope_interleaved", True)
    mrope_section = rope.sequence("mrope_section")
    if len(mrope_section) != 3 or any(type(size) is not int or size < 0 for size in mrope_section):
        rope._fault("mrope_section", mrope_section, "three integers (time, height, width) are needed")
    config = TextConfig(
        hidden_size=section.count("hidden_size"),
        intermediate_size=section.count("intermediate_size"),
        vocab_size=section.count("vocab_size"),
        layer_types=cast(tuple[LayerType, ...], tuple(layer_types)),
        num_attention_heads=section.count("num_attention_heads"),
        num_key_value_heads=section.count("num_key_value_heads"),
        head_dim=head_dim,
        linear_num_key_heads=section.count("linear_num_key_heads"),
        linear_num_value_heads=section.count("linear_num_value_heads"),
        linear_key_head_dim=section.count("linear_key_head_dim"),
        linear_value_head_dim=section.count("linear_value_head_dim"),
        linear_conv_kernel_dim=section.count("linear_conv_kernel_dim", least=2),
        rms_norm_eps=section.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta"),
        rotary_dims=int(head_dim * rope.number("partial_rotary_factor")),
        mrope_section=cast(tuple[int, int, int], tuple(mrope_section)),
    )
    rope.finish()
    section.finish()
    return config


def _disagreements(text: TextConfig, vision: VisionConfig) -> list[str]:
    """Sizes that cannot stand together."""
    side = math.isqrt(vision.num_position_embeddings)
    time, height, width = text.mrope_section
    half = text.rotary_dims // 2
    rules = [
        (vision.hidden_size % vision.num_heads == 0, "vision hidden_size must be a multiple of num_heads"),
        (vision.head_dim % 4 == 0, "the vision head's width must be a multiple of 4 for its two rotary axes"),
        (side * side == vision.num_position_embeddings, "num_position_embeddings must be a square"),
        (vision.out_hidden_size == text.hidden_size, "vision out_hidden_size must be the text's hidden_size"),
        (text.num_attention_heads % text.num_key_value_heads == 0, "query heads must be a multiple of key-value heads"),
        (text.linear_num_value_heads % text.linear_num_key_heads == 0, "value heads must be a multiple of key heads"),
        (
            text.rotary_dims % 2 == 0 and 0 < half <= text.head_dim // 2,
            "the rotated part must be an even part of a head",
        ),
        (time + height + width == half, f"mrope_section must sum to {half}, half of the {2 * half} rotated dimensions"),
        (3 * height <= half + 1 and 3 * width <= half, "mrope_section's height and width do not fit interleaved"),
    ]
    return [f"config.json: {sentence} (found {text}, {vision})" for holds, sentence in rules if not holds]


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError([f"{path.name}: not a readable JSON file ({error})"]) from error
    if not isinstance(raw, dict):
        raise CheckpointError([f"{path.name}: an object is needed, found {type(raw).__name__}"])
    return raw
