"""The float32 low-rank branch on the GPU, as further columns of the layer's own product.

`x W^T + (x A^T) B^T` is one product of `[x | x A^T]` and `[W | B]`: summed in float32, with bias and activation, and
rounded once, where the BF16 reference rounds three times. A float32 number is the sum of three BF16 numbers, its high,
middle and low eight bits. Behind x and W stand those of `x A^T` and of B, each pair that matters beside each other;
what is left out is under 2^-20 of the branch's addends. `x A^T` itself is float32 arithmetic: its products are exact.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.gpu.cublas import product
from kernels.gpu.split import three_parts
from kernels.lora import Activation, AdaptedLinear

Tensor = torch.Tensor

# Which parts of `x A^T` and of B, 0 the highest, stand beside each other.
PAIRS = ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2))
# Rows and columns that one step of a program takes, for many rows and for few; and how many runs of columns it takes
# beside each other.
MANY_ROWS, TILES = 2048, {True: (32, 64), False: (16, 128)}
RUNS = 4
MIN_RANK = 16

_ORDER = tl.constexpr(tuple(part for part, _ in PAIRS))


def joined(weight: Tensor, up: Tensor) -> Tensor:
    """A copy of the weight `[out, in]`; behind each row, in the same memory, are the parts of `up`'s row."""
    parts = _parts_of(up) if weight.dtype == torch.bfloat16 else (up,)
    behind = [parts[part].to(weight.dtype) for _, part in _pairs(weight)]
    return torch.cat([weight, *behind], dim=1)[:, : weight.shape[1]]


def lora_linear(x: Tensor, layer: AdaptedLinear, activation: Activation) -> Tensor:
    """See `kernels.lora.lora_linear`."""
    return _into(x.new_empty(len(x), len(layer.weight)), x, _row_memory(x, layer), layer, activation)


def lora_mlp(x: Tensor, first: AdaptedLinear, second: AdaptedLinear, activation: Activation) -> Tensor:
    """See `kernels.lora.lora_mlp`."""
    wide = _row_memory(x, second)
    inner = _into(wide[:, : second.weight.shape[1]], x, _row_memory(x, first), first, activation)
    return _into(x.new_empty(len(x), len(second.weight)), inner, wide, second, "none")


def _row_memory(x: Tensor, layer: AdaptedLinear) -> Tensor:
    """Memory for a layer's input rows with what stands behind them."""
    return x.new_empty(len(x), layer.weight.stride(0))


def _into(out: Tensor, x: Tensor, wide: Tensor, layer: AdaptedLinear, activation: Activation) -> Tensor:
    """A layer's result in `out`, by way of `wide`, of `_row_memory`, whose first columns are x or become it."""
    weight, bias, (down, _, scale) = layer
    _inner_product(x, down, scale, wide, len(_pairs(weight)))
    everything = weight.as_strided((len(weight), wide.shape[1]), weight.stride())
    product(wide, everything, bias, gelu=activation == "gelu_tanh", out=out)
    return out.copy_(F.gelu(out)) if activation == "gelu" else out


def _pairs(weight: Tensor) -> tuple[tuple[int, int], ...]:
    return PAIRS if weight.dtype == torch.bfloat16 else ((0, 0),)


def _parts_of(x: Tensor) -> tuple[Tensor, ...]:
    """Three BF16 numbers, float32 still, that sum up to each float32 number: its bits cut after the eighth of each."""
    parts = []
    for _ in range(3):
        part = (x.view(torch.int32) & -65536).view(torch.float32)
        parts.append(part)
        x = x - part
    return tuple(parts)


def _inner_product(x: Tensor, down: Tensor, scale: float, wide: Tensor, pairs: int) -> None:
    """`scale * x A^T`, in parts, behind the first columns of `wide`; x goes into these if it is not there."""
    rows, width = x.shape
    rank = down.shape[0]
    assert down.is_contiguous() and x.stride(1) == wide.stride(1) == 1 and wide.shape == (rows, width + pairs * rank)
    tile_rows, columns = TILES[rows >= MANY_ROWS]
    _inner[(triton.cdiv(rows, tile_rows),)](
        x,
        down,
        wide,
        scale,
        rows,
        width,
        rank,
        x.stride(0),
        wide.stride(0),
        ROWS=tile_rows,
        COLUMNS=columns,
        RUNS=RUNS,
        RANK=max(MIN_RANK, triton.next_power_of_2(rank)),
        SPLIT=pairs > 1,
        COPY=x.data_ptr() != wide.data_ptr(),
        num_warps=RUNS,
        num_stages=3,
    )


@triton.jit
def _inner(
    x,
    down,
    wide,
    scale,
    rows,
    width,
    rank,
    x_stride,
    wide_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNS: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT: tl.constexpr,
    COPY: tl.constexpr,
):
    """A warp takes a run of the columns; the runs are added in order."""
    run = tl.arange(0, RUNS)[:, None, None]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :, None]
    member = tl.arange(0, RANK)
    step = tl.arange(0, COLUMNS)
    length = tl.cdiv(tl.cdiv(width, RUNS), COLUMNS) * COLUMNS
    total = tl.zeros([RUNS, ROWS, RANK], tl.float32)
    for first in range(0, length, COLUMNS):
        column = run * length + first + step[None, None, :]
        inside = (row < rows) & (column < width)
        here = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
        if COPY:
            tl.store(wide + row * wide_stride + column, here, mask=inside)
        column = run * length + first + step[None, :, None]
        there = (member[None, None, :] < rank) & (column < width)
        a = tl.load(down + member[None, None, :] * width + column, mask=there, other=0.0)
        if SPLIT:
            high, middle, low = three_parts(a)
            total = tl.dot(here, high, tl.dot(here, middle, tl.dot(here, low, total)))
        else:
            total = tl.dot(here, a, total, input_precision="ieee")
    inner = tl.sum(total, axis=0) * scale
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    target = wide + row * wide_stride + width + member[None, :]
    inside = (row < rows) & (member[None, :] < rank)
    if SPLIT:
        parts = three_parts(inner)
        for place in tl.static_range(len(_ORDER)):
            tl.store(target + place * rank, parts[_ORDER[place]], mask=inside)
    else:
        tl.store(target, inner, mask=inside)
