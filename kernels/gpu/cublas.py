"""Matrix products by cuBLASLt, asked for what torch has no words for.

Torch lends cuBLAS a workspace, and cuBLAS uses it for a counter by which running programs take their tiles, and which
must be cleared first: about 8 us a product inside a graph, where the product itself may take 40. Lent nothing, it deals
the tiles out beforehand, at the same speed, and can split no sum over the inner dimension.

The handle is torch's. Names and numbers are those of cublasLt.h of CUDA 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

_COMPUTE_32F, _TRANSPOSED = 68, 1
_TYPES = {torch.float32: 0, torch.bfloat16: 14}
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER, _DESC_BIAS_TYPE = 3, 7, 8, 26
_EPILOGUE_NONE, _EPILOGUE_BIAS, _EPILOGUE_GELU_BIAS = 1, 4, 36
_PREF_WORKSPACE_BYTES, _PREF_ALIGNMENTS_BYTES = 1, (5, 6, 7, 8)
_MAX_ALIGNMENT_BYTES = 256
# Of so many different products the algorithms are remembered; a picture of a new size adds seven.
MAX_PLANS = 1024


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class _Shape:
    """What a product's algorithm is chosen by. Strides are from row to row, alignments in bytes."""

    device: torch.device
    dtype: torch.dtype
    rows: int
    outputs: int
    inputs: int
    strides: tuple[int, int, int]
    alignments: tuple[int, int, int]
    epilogue: int


class _Made:
    """Something of cuBLASLt's, and its end."""

    def __init__(self, kind: str, *arguments: object) -> None:
        self.handle = ctypes.c_void_p()
        create, self._set, self._destroy = (
            getattr(_library(), f"cublasLt{kind}{verb}") for verb in ("Create", "SetAttribute", "Destroy")
        )
        _call(create, ctypes.byref(self.handle), *arguments)

    def set(self, name: int, value: ctypes._SimpleCData[Any]) -> None:
        """One of its attributes, by its number."""
        _call(self._set, self.handle, ctypes.c_int(name), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def __del__(self) -> None:
        self._destroy(self.handle)


@dataclass(frozen=True)
class _Plan:
    """A product's descriptors and its algorithm."""

    operation: _Made
    weight: _Made
    x: _Made
    out: _Made
    algorithm: _Algorithm


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False, out: Tensor) -> Tensor:
    """`x W^T`, with its bias and tanh-GELU before the one rounding.

    Args:
        x: `[N, in]`, BF16 or float32; rows may lie apart.
        weight: `[out, in]`, x's dtype; rows may lie apart.
        bias: `[out]`, x's dtype.
        gelu: GELU by the tanh formula follows; only with a bias.
        out: `[N, out]`, x's dtype; rows may lie apart. Written and returned.

    Raises:
        RuntimeError: cuBLASLt refuses, with its status.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    assert x.dtype == weight.dtype == out.dtype and weight.shape[1] == inputs and out.shape == (rows, outputs)
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    assert bias.is_contiguous() if bias is not None else not gelu
    if not x.is_cuda:  # where Triton's interpreter runs the kernels around it
        base = F.linear(x, weight, bias)
        return out.copy_(F.gelu(base, approximate="tanh") if gelu else base)
    epilogue = _EPILOGUE_GELU_BIAS if gelu else _EPILOGUE_NONE if bias is None else _EPILOGUE_BIAS
    shape = _Shape(
        device=x.device,
        dtype=x.dtype,
        rows=rows,
        outputs=outputs,
        inputs=inputs,
        strides=(weight.stride(0), x.stride(0), out.stride(0)),
        alignments=(_alignment_bytes(weight), _alignment_bytes(x), _alignment_bytes(out)),
        epilogue=epilogue,
    )
    plan = _plan(shape)
    if bias is not None:
        plan.operation.set(_DESC_BIAS_POINTER, _address(bias))
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    _call(
        _library().cublasLtMatmul,
        _handle(),
        plan.operation.handle,
        ctypes.byref(one),
        _address(weight),
        plan.weight.handle,
        _address(x),
        plan.x.handle,
        ctypes.byref(zero),
        *(_address(out), plan.out.handle) * 2,
        ctypes.byref(plan.algorithm),
        None,
        ctypes.c_size_t(0),
        ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
    )
    return out


@lru_cache(MAX_PLANS)
def _plan(shape: _Shape) -> _Plan:
    """Row by row is column by column of the transposed: out^T = W x^T."""
    kind = ctypes.c_int(_TYPES[shape.dtype])
    operation = _Made("MatmulDesc", ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_TYPES[torch.float32]))
    operation.set(_DESC_TRANSA, ctypes.c_int(_TRANSPOSED))
    operation.set(_DESC_EPILOGUE, ctypes.c_int(shape.epilogue))
    operation.set(_DESC_BIAS_TYPE, kind)
    sizes = ((shape.inputs, shape.outputs), (shape.inputs, shape.rows), (shape.outputs, shape.rows))
    weight, x, out = (
        _Made("MatrixLayout", kind, *(ctypes.c_uint64(size) for size in pair), ctypes.c_int64(stride))
        for pair, stride in zip(sizes, shape.strides, strict=True)
    )
    wishes = _Made("MatmulPreference")
    wishes.set(_PREF_WORKSPACE_BYTES, ctypes.c_uint64(0))
    for name, alignment in zip(_PREF_ALIGNMENTS_BYTES, (*shape.alignments, shape.alignments[2]), strict=True):
        wishes.set(name, ctypes.c_uint32(alignment))
    found, count = _Found(), ctypes.c_int()
    described = (made.handle for made in (operation, weight, x, out, out, wishes))
    get = _library().cublasLtMatmulAlgoGetHeuristic
    _call(get, _handle(), *described, ctypes.c_int(1), ctypes.byref(found), ctypes.byref(count))
    if count.value == 0 or found.state:
        raise RuntimeError(f"cuBLASLt has no algorithm for {shape}")
    return _Plan(operation, weight, x, out, found.algorithm)


@cache
def _library() -> ctypes.CDLL:
    """The one that torch has loaded."""
    return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")


def _handle() -> ctypes.c_void_p:
    """cuBLAS's handles are cuBLASLt's too."""
    return ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]


def _call(function: Callable[..., int], *arguments: object) -> None:
    if status := function(*arguments):
        raise RuntimeError(f"{function.__name__} failed with cuBLAS status {status}")


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _alignment_bytes(tensor: Tensor) -> int:
    address = tensor.data_ptr() | _MAX_ALIGNMENT_BYTES
    return address & -address
