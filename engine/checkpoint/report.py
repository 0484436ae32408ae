"""How long work on a checkpoint tells what it has done: a bar for a person, a line a phase for a log.

It knows nothing of what the work is.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

# Phases that count something else than bytes.
COUNTED = {"warm up": "decisions"}

_BAR_WIDTH = 24
_REDRAW_INTERVAL_S = 0.1


class Report(Protocol):
    """Called from one thread as a phase goes on; the last call of a phase has `done_bytes == total_bytes`.

    The phases of `COUNTED` give numbers of what they count in the place of bytes.
    """

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None: ...


def silent(phase: str, done_bytes: int, total_bytes: int) -> None:
    """A report that nobody reads."""


class ProgressReport:
    """A report on a text stream: a bar that moves on a terminal, otherwise one line when a phase ends."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._phase = ""
        self._started_s = 0.0
        self._drawn_s = 0.0

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if phase != self._phase:
            self._phase, self._started_s, self._drawn_s = phase, now_s, 0.0
        ended = done_bytes >= total_bytes
        if self._is_terminal and (ended or now_s - self._drawn_s >= _REDRAW_INTERVAL_S):
            self._drawn_s = now_s
            self._write(f"\r\x1b[K{_bar(done_bytes, total_bytes)} {self._line(done_bytes, total_bytes, now_s)}")
        if ended:
            self._write("\n" if self._is_terminal else f"{self._line(done_bytes, total_bytes, now_s)}\n")
            self._phase = ""

    def _line(self, done_bytes: int, total_bytes: int, now_s: float) -> str:
        elapsed_s = max(now_s - self._started_s, 1e-3)
        if unit := COUNTED.get(self._phase):
            return f"{self._phase}: {done_bytes} of {total_bytes} {unit}, {elapsed_s:.1f} s"
        rate = f"{readable_bytes(round(done_bytes / elapsed_s))}/s"
        return (
            f"{self._phase}: {readable_bytes(done_bytes)} of {readable_bytes(total_bytes)}, {rate}, {elapsed_s:.1f} s"
        )

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _bar(done_bytes: int, total_bytes: int) -> str:
    filled = _BAR_WIDTH if total_bytes <= 0 else min(_BAR_WIDTH, _BAR_WIDTH * done_bytes // total_bytes)
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]"


def readable_bytes(count: int) -> str:
    """A number of bytes for a person, in decimal units: `9.32 GB`."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
