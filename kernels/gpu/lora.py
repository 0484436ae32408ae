"""The float32 low-rank branch on the GPU, without a float32 tensor as wide as the layer.

The base product is cuBLAS's. Beside it, the branch's inner product reads the activations once and leaves `[N, rank]`;
its outer product, the addition and the activation happen where the output is written. A BF16 activation times a float32
weight is exact in three BF16 products with the weight's high, middle and low eight bits, which tensor cores add in
float32: float32 arithmetic at BF16's speed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.gpu.streams import beside

Tensor = torch.Tensor

DOWN_ROWS = 64
DOWN_COLUMNS = 128
# The inner product's sum is cut into runs, so that there are about so many programs; the outer product adds the runs in
# order. A picture's grid decides how many there are, and with it the sum's bits.
DOWN_PROGRAMS = 192
MAX_RUNS = 16
UP_ROWS = 64
UP_COLUMNS = 128
NORM_ROWS = 16
MIN_RANK = 16
# Of the outer product's float32 operands (Triton's `input_precision`): TF32 three times, about 21 bits.
UP_PRECISION = "tf32x3"


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor, scale: float, activation: str
) -> Tensor:
    """See `kernels.lora.lora_linear`."""
    assert x.is_contiguous() and down.is_contiguous() and up.is_contiguous()
    inner, base = beside(x.device, lambda: lora_down(x, down), lambda: F.linear(x, weight, bias))
    return lora_up_(base, inner, up, scale, activation)


def lora_down(x: Tensor, down: Tensor) -> Tensor:
    """`x A^T` of `x` `[N, in]`, model dtype, and A `[rank, in]`, float32: addends `[runs, N, rank]`, float32."""
    rows, width = x.shape
    rank = down.shape[0]
    blocks = triton.cdiv(rows, DOWN_ROWS)
    most = min(MAX_RUNS, triton.next_power_of_2(triton.cdiv(DOWN_PROGRAMS, blocks)))
    run = triton.cdiv(triton.cdiv(width, most), DOWN_COLUMNS) * DOWN_COLUMNS
    runs = triton.cdiv(width, run)
    inner = torch.empty(runs, rows, rank, dtype=torch.float32, device=x.device)
    _down[(blocks, runs)](
        x,
        down,
        inner,
        rows,
        width,
        rank,
        ROWS=DOWN_ROWS,
        COLUMNS=DOWN_COLUMNS,
        RUN=run,
        RANK=max(MIN_RANK, triton.next_power_of_2(rank)),
        SPLIT=x.dtype == torch.bfloat16,
        num_warps=4,
        num_stages=3,
    )
    return inner


@triton.jit
def _down(
    x,
    down,
    inner,
    rows,
    width,
    rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    member = tl.arange(0, RANK)[None, :]
    total = tl.zeros([ROWS, RANK], tl.float32)
    begin = tl.program_id(1) * RUN
    for first in range(begin, tl.minimum(begin + RUN, width), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        here = tl.load(
            x + row.to(tl.int64) * width + column[None, :], mask=(row < rows) & (column[None, :] < width), other=0.0
        )
        a = tl.load(
            down + member * width + column[:, None], mask=(member < rank) & (column[:, None] < width), other=0.0
        )
        if SPLIT:
            high = a.to(tl.bfloat16)
            rest = a - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(here, high, total)
            total = tl.dot(here, middle, total)
            total = tl.dot(here, low, total)
        else:
            total = tl.dot(here, a, total, input_precision="ieee")
    inner += tl.program_id(1).to(tl.int64) * rows * rank
    tl.store(inner + row.to(tl.int64) * rank + member, total, mask=(row < rows) & (member < rank))


def lora_up_(base: Tensor, inner: Tensor, up: Tensor, scale: float, activation: str) -> Tensor:
    """`activation(base + scale * inner B^T)`, written over `base` `[N, out]` and returned.

    `inner` is of `lora_down`; `up` (B) is `[out, rank]`, float32.
    """
    rows, width = base.shape
    rank = up.shape[1]
    assert base.is_contiguous() and inner.is_contiguous()
    _up[(triton.cdiv(rows, UP_ROWS), triton.cdiv(width, UP_COLUMNS))](
        base,
        inner,
        up,
        scale,
        rows,
        width,
        rank,
        RUNS=inner.shape[0],
        ROWS=UP_ROWS,
        COLUMNS=UP_COLUMNS,
        RANK=max(MIN_RANK, triton.next_power_of_2(rank)),
        ACTIVATION=activation,
        PRECISION=UP_PRECISION if base.dtype == torch.bfloat16 else "ieee",
        num_warps=4,
    )
    return base


def lora_add_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `kernels.lora.lora_add_layer_norm`."""
    assert x.is_contiguous() and down.is_contiguous() and up.is_contiguous() and residual.is_contiguous()
    inner, base = beside(x.device, lambda: lora_down(x, down), lambda: F.linear(x, weight, bias))
    rows, width = base.shape
    normed = torch.empty_like(base)
    _up_add_norm[(triton.cdiv(rows, NORM_ROWS),)](
        base,
        inner,
        up,
        residual,
        norm_weight,
        norm_bias,
        normed,
        scale,
        eps,
        rows,
        width,
        up.shape[1],
        RUNS=inner.shape[0],
        ROWS=NORM_ROWS,
        COLUMNS=triton.next_power_of_2(width),
        RANK=max(MIN_RANK, triton.next_power_of_2(up.shape[1])),
        PRECISION=UP_PRECISION if base.dtype == torch.bfloat16 else "ieee",
        num_warps=8,
    )
    return base, normed


@triton.jit
def _up_add_norm(
    base,
    inner,
    up,
    residual,
    norm_weight,
    norm_bias,
    normed,
    scale,
    eps,
    rows,
    width,
    rank,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Whole rows, so that they can be normalised: the sum with the residual is written over `base`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    place = row.to(tl.int64) * width + column
    branch = _branch(inner, up, row, column, scale, rows, width, rank, RUNS, ROWS, RANK, PRECISION)
    value = tl.load(base + place, mask=inside, other=0.0)
    delta = (value.to(tl.float32) + branch).to(value.dtype).to(tl.float32)
    total = (tl.load(residual + place, mask=inside, other=0.0).to(tl.float32) + delta).to(value.dtype)
    tl.store(base + place, total, mask=inside)
    wide = total.to(tl.float32)
    centred = tl.where(inside, wide - (tl.sum(wide, axis=1) / width)[:, None], 0.0)
    size = tl.rsqrt(tl.sum(centred * centred, axis=1) / width + eps)[:, None]
    gain = tl.load(norm_weight + column, mask=column < width, other=0.0).to(tl.float32)
    shift = tl.load(norm_bias + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(normed + place, (centred * size * gain + shift).to(value.dtype), mask=inside)


@triton.jit
def _branch(
    inner,
    up,
    row,
    column,
    scale,
    rows,
    width,
    rank,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of `scale * inner B^T`, float32: the runs of the inner product are added in order."""
    member = tl.arange(0, RANK)
    h = tl.zeros([ROWS, RANK], tl.float32)
    for run in tl.static_range(RUNS):
        place = (run * rows + row).to(tl.int64) * rank + member[None, :]
        h += tl.load(inner + place, mask=(row < rows) & (member[None, :] < rank), other=0.0)
    b = tl.load(up + column * rank + member[:, None], mask=(column < width) & (member[:, None] < rank), other=0.0)
    return tl.dot(h, b, input_precision=PRECISION) * scale


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """GELU by the tanh formula, or by the error function.

    `x (1 + tanh y) / 2` is `x / (1 + exp(-2 y))`, with y of `sqrt(2 / pi) (x + 0.044715 x^3)`; the exponent's constants
    are folded for a power of two.
    """
    if ACTIVATION == "gelu_tanh":
        x = x / (1.0 + tl.exp2(x * (-2.302208198144325 - 0.10294323958002350 * x * x)))
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    return x


@triton.jit
def _up(
    base,
    inner,
    up,
    scale,
    rows,
    width,
    rank,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    branch = _branch(inner, up, row, column, scale, rows, width, rank, RUNS, ROWS, RANK, PRECISION)
    target = base + row.to(tl.int64) * width + column
    inside = (row < rows) & (column < width)
    value = tl.load(target, mask=inside, other=0.0)
    total = (value.to(tl.float32) + branch).to(value.dtype).to(tl.float32)
    tl.store(target, _activate(total, ACTIVATION).to(value.dtype), mask=inside)
