"""A float32 number as three BF16 numbers, for products at BF16's speed that keep float32's digits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cut(x):
    """A float32 as its sign, exponent and high seven bits, which are a BF16 number, and what is left, exactly.

    Cut off, not rounded: the GPU converts one number at a time, which would take as long as the products.
    """
    bits = x.to(tl.uint32, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return high, x - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def three_parts(x):
    """Three BF16 numbers that sum up to a float32."""
    high, rest = cut(x)
    middle, rest = cut(rest)
    low, _ = cut(rest)
    return high, middle, low
