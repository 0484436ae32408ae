"""Progress on a stream: a bar that is redrawn for a person, one line a phase for a log."""

from __future__ import annotations

import io
import time

import pytest

from engine.checkpoint import ProgressReport
from engine.checkpoint.report import readable_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_phase(report: ProgressReport, phase: str, total_bytes: int = 10) -> None:
    for done_bytes in range(total_bytes + 1):
        report(phase, done_bytes, total_bytes)


def test_a_log_gets_one_line_a_phase() -> None:
    stream = io.StringIO()
    report = ProgressReport(stream)
    run_phase(report, "verify")
    run_phase(report, "export", total_bytes=2_000)
    run_phase(report, "export", total_bytes=2_000)
    lines = stream.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["verify", "export", "export"]
    assert lines[0].startswith("verify: 10 B of 10 B, ")
    assert lines[1].startswith("export: 2.0 kB of 2.0 kB, ")
    assert lines[1].split(", ")[1].endswith("/s")


def test_a_terminal_gets_a_bar_that_ends_full_on_a_line_of_its_own() -> None:
    stream = Terminal()
    report = ProgressReport(stream)
    report("verify", 0, 8)
    report("verify", 8, 8)
    drawn = stream.getvalue().split("\r")
    assert drawn[0] == ""
    assert "[........................] verify: 0 B of 8 B" in drawn[1]
    assert "[########################] verify: 8 B of 8 B" in drawn[-1]
    assert stream.getvalue().endswith("\n")
    assert stream.getvalue().count("\n") == 1


def test_a_terminal_is_not_redrawn_for_every_call() -> None:
    stream = Terminal()
    run_phase(ProgressReport(stream), "verify", total_bytes=10_000)
    assert 2 <= stream.getvalue().count("\r") < 1_000


def test_a_phase_that_comes_again_is_timed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([0.0, 5.0, 100.0, 105.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s))
    stream = io.StringIO()
    report = ProgressReport(stream)
    for done_bytes in (0, 10, 0, 10):
        report("export", done_bytes, 10)
    assert stream.getvalue() == 2 * "export: 10 B of 10 B, 2 B/s, 5.0 s\n"


def test_nothing_to_do_is_done_at_once() -> None:
    stream = io.StringIO()
    ProgressReport(stream)("verify", 0, 0)
    assert stream.getvalue().startswith("verify: 0 B of 0 B")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (33_000_000, "33.0 MB"), (9_319_828_096, "9.32 GB")],
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert readable_bytes(count) == text


def test_a_warm_up_counts_decisions() -> None:
    stream = io.StringIO()
    run_phase(ProgressReport(stream), "warm up", total_bytes=4)
    assert stream.getvalue().startswith("warm up: 4 of 4 decisions, ")
