"""From pixels to the vision encoder's rows: patches in merge order, their places on the grid, their learned positions.

Merge order: the grid is walked in blocks of `merge x merge` patches, row by row, and each block row by row, so that the
patches that become one token stand together.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

# Half of the byte range: pixels are brought to -1..1 by `(x - 127.5) / 127.5`.
PIXEL_CENTRE = 127.5


def pack_patches(
    pixels: Tensor, patch: int = 16, frames: int = 2, merge: int = 2, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normalised patches of a picture.

    Args:
        pixels: `uint8 [height, width, 3]`, both sides multiples of `patch * merge`.
        patch: a patch's side in pixels.
        frames: how often the picture stands in each patch, as the still frames of a video would.
        merge: the side, in patches, of the blocks that become one token.
        dtype: of the result; values are computed in float32 and rounded to it.

    Returns:
        `[patches, 3 * frames * patch * patch]`, in merge order; a patch's values run over channel, frame, row, column.

    Source: the image processor of Qwen2-VL (arXiv 2409.12191).
    """
    height, width, channels = pixels.shape
    block = patch * merge
    assert pixels.dtype == torch.uint8 and height % block == 0 and width % block == 0, (pixels.dtype, pixels.shape)
    if pixels.is_cuda:
        from kernels.gpu import patches as gpu

        return gpu.pack_patches(pixels, patch, frames, merge, dtype)
    values = ((pixels.float() - PIXEL_CENTRE) / PIXEL_CENTRE).to(dtype)
    # [block row, row in block, y, block column, column in block, x, channel]
    split = values.view(height // block, merge, patch, width // block, merge, patch, channels)
    packed = split.permute(0, 3, 1, 4, 6, 2, 5)  # [block row, block column, row, column, channel, y, x]
    repeated = packed.unsqueeze(5).expand(*packed.shape[:5], frames, patch, patch)
    return repeated.reshape((height // patch) * (width // patch), channels * frames * patch * patch)


def patch_places(grid_rows: int, grid_columns: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row and the column of every patch on the grid, in merge order: two of `[N]`, int64."""
    assert grid_rows % merge == 0 and grid_columns % merge == 0, (grid_rows, grid_columns)
    places = torch.arange(grid_rows * grid_columns, device=device).view(
        grid_rows // merge, merge, grid_columns // merge, merge
    )
    order = places.transpose(1, 2).flatten()
    return order // grid_columns, order % grid_columns


def interpolate_table(table: Tensor, rows: Tensor, columns: Tensor, grid_rows: int, grid_columns: int) -> Tensor:
    """Learned positions of a square table, stretched over a grid: bilinear, corner on corner.

    Args:
        table: `[side * side, D]`, model dtype, row by row.
        rows, columns: `[N]`, int64: the patches' places on the grid.
        grid_rows, grid_columns: the grid's size in patches.

    Returns:
        `[N, D]`, model dtype: weights and sum in float32, rounded once.

    Source: bilinear interpolation with aligned corners; the order of operations is that of Transformers 5.17, whose
    float32 bits it has.
    """
    side = round(table.shape[0] ** 0.5)
    row_taps, row_weights = _taps(rows, grid_rows, side)
    column_taps, column_weights = _taps(columns, grid_columns, side)
    places = (row_taps[:, :, None] * side + column_taps[:, None, :]).flatten(1)  # [N, 4]
    weights = (row_weights[:, :, None] * column_weights[:, None, :]).flatten(1)
    return (table[places] * weights[:, :, None]).sum(1).to(table.dtype)


def _taps(index: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """For each place on an axis of `size`: the two neighbours on an axis of `side` and their weights, each `[N, 2]`."""
    at = index.float() * (side - 1) / max(size - 1, 1)
    floor = at.floor()
    below = floor.long()
    taps = torch.stack([below, (below + 1).clamp(max=side - 1)], dim=1)
    beyond = at - floor
    return taps, torch.stack([1 - beyond, 1 - (1 - beyond)], dim=1)
