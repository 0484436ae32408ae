"""The element-wise gates on the GPU: SwiGLU's middle and full attention's output gate."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """See `kernels.mlp.swiglu`."""
    assert gate_up.is_contiguous()
    tokens, columns = gate_up.shape
    out = torch.empty(tokens, columns // 2, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(tokens, triton.cdiv(columns // 2, BLOCK))](gate_up, out, columns // 2, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + token * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * width + width + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded between the activation and the product, as two operators would.
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + token * width + column, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


def gate_output(attended: Tensor, gate: Tensor) -> Tensor:
    """See `kernels.attention.gate_output`."""
    assert attended.is_contiguous() and gate.stride(1) == 1
    tokens, width = attended.shape
    out = torch.empty_like(attended)
    grid = (tokens, triton.cdiv(width, BLOCK))
    _gate_output[grid](attended, gate, out, gate.stride(0), width, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _gate_output(attended, gate, out, gate_stride, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(attended + token * width + column, mask=inside, other=0.0)
    wide = tl.load(gate + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-wide))).to(value.dtype)
    tl.store(out + token * width + column, (value.to(tl.float32) * opened.to(tl.float32)).to(value.dtype), mask=inside)
