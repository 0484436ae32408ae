"""Ends a process that hangs: a stage that lasts too long prints every thread's frames and ends it with exit code 1.

Two look. A thread, which reads the frames with the interpreter's lock, so that nobody changes them meanwhile; and for a
call that keeps that lock for good, the timer of `faulthandler`, which needs none and comes a little later. Frames only,
never values: no image and no prompt. The limits are the process's: several stages may run side by side.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TextIO

TICK_S = 0.1
# To set the timer costs a thread: one that comes at most this much after a limit is left as it is.
MAX_GRACE_S = 5.0


class _Limits:
    """The running stages' limits, and the timer behind them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._running: dict[int, tuple[float, float]] = {}
        self._timer_s = 0.0

    def begin(self, limit_s: float) -> int:
        """A stage of at most `limit_s` begins; returns its number."""
        number = next(self._numbers)
        with self._lock:
            self._running[number] = (time.monotonic() + limit_s, limit_s)
            self._set_timer()
        return number

    def end(self, number: int) -> None:
        """It is over."""
        with self._lock:
            del self._running[number]

    def look(self) -> bool:
        """Keep the timer right; returns whether a stage is over its limit."""
        with self._lock:
            self._set_timer()
            return any(end_s < time.monotonic() for end_s, _ in self._running.values())

    def _set_timer(self) -> None:
        if self._running:
            end_s, limit_s = min(self._running.values())
            latest_s = end_s + min(MAX_GRACE_S, 5 * TICK_S + limit_s)
            if not end_s <= self._timer_s <= latest_s:
                self._timer_s = latest_s
                left_s = max(0.001, latest_s - time.monotonic())
                faulthandler.dump_traceback_later(left_s, exit=True, file=_console())
        elif self._timer_s:
            self._timer_s = 0.0
            faulthandler.cancel_dump_traceback_later()


_limits = _Limits()


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """End the process if the block lasts longer than `limit_s`."""
    _watcher()
    number = _limits.begin(limit_s)
    try:
        yield
    finally:
        _limits.end(number)


@cache
def _watcher() -> threading.Thread:
    thread = threading.Thread(target=_watch, name="watchdog", daemon=True)
    thread.start()
    return thread


def _watch() -> None:
    while not _limits.look():
        time.sleep(TICK_S)
    faulthandler.cancel_dump_traceback_later()
    print("Timeout: a stage of this worker lasts longer than its limit.", file=_console(), flush=True)
    faulthandler.dump_traceback(_console())
    os._exit(1)


def _console() -> TextIO:
    return sys.__stderr__ or sys.stderr
