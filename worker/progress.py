"""How far the start is: into the worker's hash in Redis, and to whoever looks at the console."""

from __future__ import annotations

from worker.answer import Report
from worker.beat import Pulse

_STATES = {"verify": "verifying", "load": "loading"}


class Progress:
    """The report that an engine's start is given."""

    def __init__(self, pulse: Pulse, console: Report) -> None:
        self._pulse = pulse
        self._console = console

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """As `Report`; a phase's first word says which it is."""
        share = 1.0 if total_bytes <= 0 else done_bytes / total_bytes
        self._pulse.facts["progress"] = f"{100 * share:.0f}%"
        self._pulse.state = _STATES.get(phase.partition(" ")[0], "warming")
        self._console(phase, done_bytes, total_bytes)
