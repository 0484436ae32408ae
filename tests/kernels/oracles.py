"""What the kernel tests share: tolerances beside their dtypes, and random inputs with fixed seeds."""

from __future__ import annotations

import torch

# Largest difference from a float64 oracle, as a part of the oracle's largest value. BF16 results are rounded up to
# three times on their way (2^-9 each); float32 sums are over some hundred terms.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}
DTYPES = tuple(TOLERANCES)


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: torch.Tensor, oracle: torch.Tensor) -> float:
    """The largest difference, as a part of the oracle's largest value; infinite where `found` is not finite."""
    assert found.shape == oracle.shape, (found.shape, oracle.shape)
    if not found.isfinite().all():
        return float("inf")
    return float((found.double() - oracle.double()).abs().max() / oracle.double().abs().max())


def assert_close(found: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype) -> None:
    """`found` has the dtype and agrees with the oracle within its tolerance."""
    assert found.dtype == dtype
    assert error(found, oracle) <= TOLERANCES[dtype]
