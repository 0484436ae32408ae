"""Ends a process that hangs: a stage that lasts too long prints every thread's frames and ends it with exit code 1.

The timer is the C thread of `faulthandler`. It needs no interpreter lock, so it also fires while a GPU call holds it
for good. It prints frames only, never values: no image and no prompt. A process has one such timer, and several stages
may run side by side: it is set to the one that ends first.
"""

from __future__ import annotations

import faulthandler
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_numbers = itertools.count()
_ends_s: dict[int, float] = {}
_setting = threading.Lock()


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """End the process if the block lasts longer than `limit_s`."""
    number = next(_numbers)
    with _setting:
        _ends_s[number] = time.monotonic() + limit_s
        _set_timer()
    try:
        yield
    finally:
        with _setting:
            del _ends_s[number]
            _set_timer()


def _set_timer() -> None:
    if not _ends_s:
        return faulthandler.cancel_dump_traceback_later()
    left_s = max(0.001, min(_ends_s.values()) - time.monotonic())
    return faulthandler.dump_traceback_later(left_s, exit=True, file=sys.__stderr__ or sys.stderr)
