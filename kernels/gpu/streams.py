"""Two pieces of work beside each other on one GPU, where neither reads what the other writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")


def beside(device: torch.device, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """Run `first` on a stream of its own beside `second`; the current stream goes on when both are done.

    Small kernels then hide behind a large one. Captured, the two are branches of the graph. Memory stays safe without
    marking tensors: the side stream starts after all earlier work and is joined before anything can be freed.
    """
    if device.type != "cuda":
        return first(), second()
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        one = first()
    other = second()
    main.wait_stream(side)
    return one, other


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
