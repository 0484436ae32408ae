"""How far the start is: into the worker's hash in Redis, and onto the terminal of whoever looks, or into a log."""

from __future__ import annotations

from engine.checkpoint.report import ProgressReport
from worker.beat import Pulse

_STATES = {"verify": "verifying", "load": "loading"}


class Progress:
    """The report that an engine's start is given."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._console = ProgressReport()

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """Told by the engine; see `engine.checkpoint.report.Report`."""
        self._pulse.state = _STATES.get(phase.split()[0] if phase else "", "warming")
        share = 1.0 if total_bytes <= 0 else done_bytes / total_bytes
        self._pulse.facts["progress"] = f"{100 * share:.0f}%"
        self._console(phase, done_bytes, total_bytes)
