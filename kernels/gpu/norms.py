"""RMS norm, gated RMS norm and layer norm on the GPU: one program a row, each row read once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.norms.rms_norm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    _rms_norm[(rows,)](x, x, weight, x, out, eps, width, BLOCK=triton.next_power_of_2(width), ADD=False, num_warps=8)
    return out


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.norms.add_rms_norm`."""
    assert residual.is_contiguous() and delta.is_contiguous() and residual.shape == delta.shape
    rows, width = residual.shape
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](residual, delta, weight, total, out, eps, width, BLOCK=block, ADD=True, num_warps=8)
    return total, out


@triton.jit
def _rms_norm(x, delta, weight, total, out, eps, width, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row + columns, mask=inside, other=0.0)
    if ADD:
        # The sum is rounded to the model dtype before anything is measured of it.
        value = (value.to(tl.float32) + tl.load(delta + row + columns, mask=inside, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(total + row + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    gain = 1.0 + tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (wide * scale * gain).to(value.dtype), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.norms.gated_rms_norm`."""
    assert x.is_contiguous() and gate.stride(1) == 1
    tokens, heads, width = x.shape
    out = torch.empty(tokens, heads * width, dtype=x.dtype, device=x.device)
    tiles = {"HEADS": triton.next_power_of_2(heads), "BLOCK": triton.next_power_of_2(width)}
    _gated_rms_norm[(tokens,)](x, gate, weight, out, gate.stride(0), eps, heads, width, **tiles, num_warps=8)
    return out


@triton.jit
def _gated_rms_norm(x, gate, weight, out, gate_stride, eps, heads, width, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (column < width)
    place = head * width + column
    value = tl.load(x + token * heads * width + place, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)
    normed = (wide * scale[:, None]).to(value.dtype).to(tl.float32)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    weighted = (gain * normed).to(value.dtype).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    gated = weighted * (gates / (1.0 + tl.exp(-gates)))
    tl.store(out + token * heads * width + place, gated.to(value.dtype), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `kernels.norms.layer_norm`."""
    assert x.is_contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _layer_norm[(rows,)](x, x, weight, bias, x, out, eps, width, BLOCK=block, ADD=False, num_warps=4)
    return out


def add_layer_norm(residual: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.norms.add_layer_norm`."""
    assert residual.is_contiguous() and delta.is_contiguous() and residual.shape == delta.shape
    rows, width = residual.shape
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    _layer_norm[(rows,)](residual, delta, weight, bias, total, out, eps, width, BLOCK=block, ADD=True, num_warps=4)
    return total, out


@triton.jit
def _layer_norm(x, delta, weight, bias, total, out, eps, width, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row + columns, mask=inside, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(delta + row + columns, mask=inside, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(total + row + columns, value, mask=inside)
    wide = value.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, axis=0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (centred * scale * gain + shift).to(value.dtype), mask=inside)
