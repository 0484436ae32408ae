"""The vision encoder: patches of one picture in, one row a token of the language model out.

The architecture is the vision encoder of Qwen3.5 (after Qwen2-VL, arXiv 2409.12191): pre-norm blocks with 2-D rotary
attention, then a merger of 2 x 2 patches. The LoRA branches stay apart, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.config import LAYER_NORM_EPS, VisionConfig
from kernels.attention import full_attention
from kernels.linear import linear
from kernels.lora import AdaptedLinear, lora_mlp
from kernels.norms import add_layer_norm, layer_norm
from kernels.patches import interpolate_table, patch_places
from kernels.rotary import Table, split_rotate_vision, vision_table

Tensor = torch.Tensor


class Affine(NamedTuple):
    """A weight and its bias, model dtype."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class VisionBlock:
    """One block's tensors. `qkv` is `[3 * D, D]`, `fc1` `[F, D]`, `fc2` `[D, F]`; norms are `[D]`."""

    norm1: Affine
    qkv: Affine
    proj: Affine
    norm2: Affine
    fc1: AdaptedLinear
    fc2: AdaptedLinear


@dataclass(frozen=True)
class Merger:
    """The norm of single patches, and the two layers over each `merged_patches` of them, side by side."""

    norm: Affine
    fc1: AdaptedLinear
    fc2: AdaptedLinear


class GridTables(NamedTuple):
    """Of a grid's patches: learned positions `[N, D]`, model dtype, and the rotary table."""

    positions: Tensor
    rotary: Table


@dataclass(frozen=True)
class VisionEncoder:
    """The whole encoder.

    `patch` is the patch projection `[D, patch_values]`; `positions` the learned table `[side * side, D]`; `frequencies`
    the rotary embedding's, `[head_dim / 4]` float32.
    """

    config: VisionConfig
    patch: Affine
    positions: Tensor
    frequencies: Tensor
    blocks: tuple[VisionBlock, ...]
    merger: Merger

    def grid_tables(self, grid: tuple[int, int, int]) -> GridTables:
        """What every picture of a grid `(1, rows, columns)` shares; worth keeping where grids come again."""
        _, rows, columns = grid
        at_row, at_column = patch_places(rows, columns, self.config.spatial_merge_size, self.positions.device)
        positions = interpolate_table(self.positions, at_row, at_column, rows, columns)
        return GridTables(positions, vision_table(at_row, at_column, self.frequencies))

    def __call__(self, pixel_values: Tensor, grid: tuple[int, int, int], tables: GridTables | None = None) -> Tensor:
        """Encode one picture.

        Args:
            pixel_values: `[N, patch_values]`, float32 or the model dtype, of `kernels.patches.pack_patches`.
            grid: `(1, rows, columns)` in patches; N is their product.
            tables: of `grid_tables`, if they were kept.

        Returns:
            `[N / merged_patches, out_hidden_size]`, model dtype: a row for each of the image's tokens, in order.
        """
        frames, rows, columns = grid
        assert frames == 1 and pixel_values.shape == (rows * columns, self.config.patch_values), (
            grid,
            pixel_values.shape,
        )
        positions, rotary = tables or self.grid_tables(grid)
        # The product is rounded before its bias is added, as the reference's convolution does it.
        hidden = linear(pixel_values.to(self.patch.weight.dtype), self.patch.weight) + self.patch.bias
        return self._merge(self._run_blocks(hidden + positions, rotary))

    def _run_blocks(self, hidden: Tensor, table: Table) -> Tensor:
        """All blocks over `[N, D]`; the last block's rows come back normalised for the merger."""
        norms = [*(block.norm1 for block in self.blocks), self.merger.norm]
        normed = layer_norm(hidden, *norms[0], LAYER_NORM_EPS)
        for block, next_norm in zip(self.blocks, norms[1:], strict=True):
            q, k, v = split_rotate_vision(linear(normed, *block.qkv), table, self.config.num_heads)
            attended = linear(full_attention(q, k, v), *block.proj)
            hidden, normed = add_layer_norm(hidden, attended, *block.norm2, LAYER_NORM_EPS)
            mixed = lora_mlp(normed, block.fc1, block.fc2, "gelu_tanh")
            hidden, normed = add_layer_norm(hidden, mixed, *next_norm, LAYER_NORM_EPS)
        return normed

    def _merge(self, normed: Tensor) -> Tensor:
        return lora_mlp(normed.view(-1, self.config.merged_size), self.merger.fc1, self.merger.fc2, "gelu")
