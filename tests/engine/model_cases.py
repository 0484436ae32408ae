"""What the model tests share: tiny configs, request shapes, and both implementations' results for them.

A case's request is made of random ids and pixels with a fixed seed; results are cached, since many tests read them.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel

from engine.model import LanguageModel, Model, Segments, State, load_model
from engine.prompt import positions
from kernels.patches import pack_patches
from tests.engine import reference as hf

Tensor = torch.Tensor

# Largest difference in float32, as a part of the reference tensor's largest value.
FLOAT32_TOLERANCE = 1e-4
# BF16: at most this many times the reference's own error, plus, for probabilities, the contract's absolute part.
BF16_FACTOR, BF16_PROBABILITY = 2.0, 0.01
CLEAR_MARGIN = 0.05

CONFIGS = {
    "plain": hf.tiny_config(),
    # Head widths of the real model, three value heads a key head, a last layer that is linear, a small position table.
    "real heads": hf.tiny_config(
        text={
            "hidden_size": 80,
            "num_hidden_layers": 5,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "rope_theta": 10_000_000,
                "partial_rotary_factor": 0.25,
            },
        },
        vision={"depth": 3, "num_heads": 1, "out_hidden_size": 80, "num_position_embeddings": 64},
    ),
    # No grouping anywhere, key and value heads of different widths, another convolution, frames and patches.
    "ungrouped": hf.tiny_config(
        text={
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "num_key_value_heads": 4,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 40,
            "linear_conv_kernel_dim": 3,
        },
        vision={"depth": 1, "num_heads": 8, "patch_size": 8, "temporal_patch_size": 1},
    ),
}


@dataclass(frozen=True)
class Case:
    """A request's shape: the grid in patches, tokens before the image, and each question's own tokens."""

    grid: tuple[int, int]
    head_tokens: int
    tails: tuple[int, ...]

    @property
    def image_tokens(self) -> int:
        return self.grid[0] * self.grid[1] // 4

    @property
    def shared_tokens(self) -> int:
        return self.head_tokens + self.image_tokens

    def options(self) -> list[int]:
        """How many letters each question uses."""
        return [(2, 5, 26, 3, 9, 4, 14, 7)[question % 8] for question in range(len(self.tails))]


CASES = {
    "one token": Case((2, 2), 5, (3,)),
    "three questions": Case((6, 10), 79, (20, 31, 7)),
    "eight questions, tall": Case((14, 2), 60, (9, 1, 64, 65, 2, 33, 17, 5)),
    "long, wide": Case((18, 34), 40, (130, 64)),
}
PAIRS = [(config, case) for config in CONFIGS for case in CASES]


@dataclass(frozen=True)
class Request:
    """A case with its contents: pixel values `[N, values]`, and every question's whole prompt."""

    case: Case
    pixel_values: Tensor
    prompts: tuple[Tensor, ...]

    @property
    def grid(self) -> tuple[int, int, int]:
        return 1, *self.case.grid


@dataclass(frozen=True)
class Expected:
    """The reference's results: features, and for each question its positions, layers' outputs and letter logits."""

    features: Tensor
    positions: tuple[Tensor, ...]
    layers: tuple[tuple[Tensor, ...], ...]
    logits: tuple[Tensor, ...]


@functools.cache
def request(config: str, case: str) -> Request:
    shape, generator = CASES[case], torch.Generator().manual_seed(len(case))
    vision = CONFIGS[config]["vision_config"]
    assert isinstance(vision, dict)
    patch = vision["patch_size"]
    size = (shape.grid[0] * patch, shape.grid[1] * patch, 3)
    pixels = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    shared = torch.full((shape.shared_tokens,), hf.IMAGE_TOKEN_ID)
    shared[: shape.head_tokens] = torch.randint(0, 290, (shape.head_tokens,), generator=generator)
    tails = (torch.randint(0, 290, (tokens,), generator=generator) for tokens in shape.tails)
    return Request(
        shape,
        pack_patches(pixels, patch, vision["temporal_patch_size"]),
        tuple(torch.cat([shared, tail]) for tail in tails),
    )


@contextmanager
def checkpoint(config: str, dtype: torch.dtype = torch.float32) -> Iterator[hf.TinyCheckpoint]:
    """A fresh checkpoint of a config, always with the same weights; `dtype` is that of the merged export."""
    with tempfile.TemporaryDirectory() as folder:
        yield hf.write_checkpoint(Path(folder), CONFIGS[config], seed=len(config), export_dtype=dtype)


def load(paths: hf.TinyCheckpoint, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(paths.base, paths.adapter, paths.export, device="cpu", dtype=dtype)


@functools.cache
def model(config: str, dtype: torch.dtype = torch.float32) -> Model:
    """Ours."""
    with checkpoint(config, dtype) as paths:
        return load(paths, dtype)


@functools.cache
def _reference(config: str, dtype: torch.dtype) -> PeftModel:
    with checkpoint(config, dtype) as paths:
        return hf.load_reference(paths, dtype)


@functools.cache
@torch.no_grad()
def expected(config: str, case: str, dtype: torch.dtype = torch.float32) -> Expected:
    """Theirs."""
    asked, theirs = request(config, case), _reference(config, dtype).base_model.model
    grid = torch.tensor([asked.grid])
    features = theirs.model.get_image_features(asked.pixel_values, grid, return_dict=True).pooler_output[0]
    found_positions, found_layers, found_logits = [], [], []
    for ids in asked.prompts:
        is_image = (ids == hf.IMAGE_TOKEN_ID).int()[None]
        found_positions.append(theirs.model.get_rope_index(ids[None], is_image, image_grid_thw=grid)[0][:, 0])
        with _layer_outputs(theirs.model.language_model.layers) as outputs:
            found = theirs(
                input_ids=ids[None], pixel_values=asked.pixel_values, image_grid_thw=grid, mm_token_type_ids=is_image
            )
        found_layers.append(tuple(outputs))
        found_logits.append(found.logits[0, -1, list(hf.LETTER_IDS)])
    return Expected(features, tuple(found_positions), tuple(found_layers), tuple(found_logits))


@contextmanager
def _layer_outputs(layers: torch.nn.ModuleList) -> Iterator[list[Tensor]]:
    """What each layer gives, `[T, D]`, of the one pass made inside the block."""
    outputs: list[Tensor] = []

    def note(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        outputs.append(output[0])

    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Packed:
    """A request's rows for one pass, cut after `segments.prefix_tokens`."""

    hidden: Tensor
    positions: Tensor
    segments: Segments

    def run(self, language: LanguageModel, state: State | None = None) -> tuple[Tensor, State]:
        return language.prefill(self.hidden, self.positions, self.segments, state)

    def rows_of(self, question: int) -> Tensor:
        """The rows of a question's whole prompt."""
        suffix = self.segments.suffixes[question]
        return torch.cat([torch.arange(self.segments.prefix_tokens), torch.arange(suffix.start, suffix.stop)])


def embedded(ours: Model, asked: Request, features: Tensor) -> list[Tensor]:
    """Every whole prompt's rows, the image's features in place."""
    rows = [ours.language.embed(ids) for ids in asked.prompts]
    for part in rows:
        part[asked.case.head_tokens : asked.case.shared_tokens] = features
    return rows


def prompt_positions(case: Case, question: int) -> Tensor:
    return positions(case.head_tokens, (case.grid[0] // 2, case.grid[1] // 2), case.tails[question])


def pack(ours: Model, asked: Request, features: Tensor, start: int, cut: int) -> Packed:
    """Prompts from token `start` on, sharing a prefix up to `cut`, which lies before the questions' own tokens."""
    assert start <= cut <= asked.case.shared_tokens
    hidden = embedded(ours, asked, features)
    axes = [prompt_positions(asked.case, question) for question in range(len(hidden))]
    return Packed(
        torch.cat([hidden[0][start:cut], *(part[cut:] for part in hidden)]),
        torch.cat([axes[0][:, start:cut], *(part[:, cut:] for part in axes)], dim=1),
        Segments(cut - start, tuple(len(part) - cut for part in hidden)),
    )


def relative_error(found: Tensor, oracle: Tensor) -> float:
    """The largest difference, as a part of the oracle's largest value; infinite where `found` is not finite."""
    assert found.shape == oracle.shape, (found.shape, oracle.shape)
    if not found.isfinite().all():
        return float("inf")
    return float((found.float() - oracle.float()).abs().max() / oracle.float().abs().max())
