"""Matrix products by cuBLASLt, asked for what torch has no words for.

Torch lends cuBLAS a workspace, and cuBLAS uses it for a counter by which running programs take their tiles, and which
must be cleared first: about 8 us a product inside a graph, where the product itself may take 40. Lent nothing, it deals
the tiles out beforehand, at the same speed, and can split no sum over the inner dimension.

The handle is torch's. Names and numbers are those of cublasLt.h of CUDA 13.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

_COMPUTE_32F, _TRANSPOSED = 68, 1
_TYPES = {torch.float32: 0, torch.bfloat16: 14}
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER, _DESC_BIAS_TYPE = 3, 7, 8, 26
_EPILOGUE_NONE, _EPILOGUE_BIAS, _EPILOGUE_GELU_BIAS = 1, 4, 36
_PREF_WORKSPACE_BYTES, _PREF_ALIGNMENTS_BYTES = 1, (5, 6, 7, 8)
_MAX_ALIGNMENT_BYTES = 256


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


@dataclass(frozen=True)
class _Plan:
    """A product's descriptors, which live as long as the process, and its algorithm."""

    operation: ctypes.c_void_p
    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    out: ctypes.c_void_p
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
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1 and (bias is not None or not gelu)
    if not x.is_cuda:  # where Triton's interpreter runs the kernels around it
        base = F.linear(x, weight, bias)
        return out.copy_(F.gelu(base, approximate="tanh") if gelu else base)
    epilogue = _EPILOGUE_GELU_BIAS if gelu else _EPILOGUE_NONE if bias is None else _EPILOGUE_BIAS
    tensors = (weight, x, out)
    strides, alignments = (tuple(ask(tensor) for tensor in tensors) for ask in (_stride, _alignment_bytes))
    shape = _Shape(x.device, x.dtype, rows, outputs, inputs, strides, alignments, epilogue)  # type: ignore[arg-type]
    plan = _plan(shape)
    if bias is not None:
        _set(_library().cublasLtMatmulDescSetAttribute, plan.operation, _DESC_BIAS_POINTER, _address(bias))
    _call(
        _library().cublasLtMatmul,
        _handle(),
        plan.operation,
        ctypes.byref(ctypes.c_float(1.0)),
        _address(weight),
        plan.weight,
        _address(x),
        plan.x,
        ctypes.byref(ctypes.c_float(0.0)),
        _address(out),
        plan.out,
        _address(out),
        plan.out,
        ctypes.byref(plan.algorithm),
        None,
        ctypes.c_size_t(0),
        ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
    )
    return out


@cache
def _plan(shape: _Shape) -> _Plan:
    """Row by row is column by column of the transposed: out^T = W x^T."""
    library, kind = _library(), ctypes.c_int(_TYPES[shape.dtype])
    operation = _made(library.cublasLtMatmulDescCreate, ctypes.c_int(_COMPUTE_32F), ctypes.c_int(0))
    attributes = {_DESC_TRANSA: _TRANSPOSED, _DESC_EPILOGUE: shape.epilogue, _DESC_BIAS_TYPE: kind.value}
    for name, value in attributes.items():
        _set(library.cublasLtMatmulDescSetAttribute, operation, name, ctypes.c_int(value))
    sizes = ((shape.inputs, shape.outputs), (shape.inputs, shape.rows), (shape.outputs, shape.rows))
    weight, x, out = (
        _made(library.cublasLtMatrixLayoutCreate, kind, *(ctypes.c_uint64(size) for size in pair), ctypes.c_int64(step))
        for pair, step in zip(sizes, shape.strides, strict=True)
    )
    preference = _made(library.cublasLtMatmulPreferenceCreate)
    choose = library.cublasLtMatmulPreferenceSetAttribute
    _set(choose, preference, _PREF_WORKSPACE_BYTES, ctypes.c_uint64(0))
    for name, alignment in zip(_PREF_ALIGNMENTS_BYTES, (*shape.alignments, shape.alignments[2]), strict=True):
        _set(choose, preference, name, ctypes.c_uint32(alignment))
    found, count = _Found(), ctypes.c_int()
    where = (weight, x, out, out, preference)
    _call(
        library.cublasLtMatmulAlgoGetHeuristic,
        _handle(),
        operation,
        *where,
        ctypes.c_int(1),
        ctypes.byref(found),
        ctypes.byref(count),
    )
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


def _made(create: ctypes._CFuncPtr, *arguments: object) -> ctypes.c_void_p:  # type: ignore[name-defined]
    made = ctypes.c_void_p()
    _call(create, ctypes.byref(made), *arguments)
    return made


def _set(setter: ctypes._CFuncPtr, target: ctypes.c_void_p, name: int, value: ctypes._SimpleCData) -> None:  # type: ignore[name-defined,type-arg]
    _call(setter, target, ctypes.c_int(name), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _call(function: ctypes._CFuncPtr, *arguments: object) -> None:  # type: ignore[name-defined]
    if status := function(*arguments):
        raise RuntimeError(f"{function.__name__} failed with cuBLAS status {status}")


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _stride(tensor: Tensor) -> int:
    return tensor.stride(0)


def _alignment_bytes(tensor: Tensor) -> int:
    address = tensor.data_ptr() | _MAX_ALIGNMENT_BYTES
    return address & -address
