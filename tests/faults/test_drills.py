"""A little of each drill; `make drills` does all of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.faults import faults, hostile
from tests.faults.faults import Row
from tests.faults.report import replace_section, table

LEASE = {"lease_s": 1.0, "beat_s": 0.25}
DRILLS: dict[str, Callable[[], Row]] = {
    **{f"killed while {phase}": partial(faults.killed_worker, phase, 1) for phase in ("waiting", *faults.INSTANTS_S)},
    "killed in turn": lambda: faults.killed_in_turn(1),
    "terminated": lambda: faults.terminated_worker(2),
    "server killed": lambda: faults.killed_server(2, 1),
    "server paused": lambda: faults.silent_server(1.0, is_gone=False),
    "server gone": lambda: faults.silent_server(3.0, is_gone=True),
    "lock held": lambda: faults.held_lock(2, **LEASE),
    "two workers": lambda: faults.several_workers(2, 50),
}


@pytest.mark.parametrize("name", DRILLS)
def test_no_job_is_lost_or_answered_twice(name: str) -> None:
    row = DRILLS[name]()
    assert row.sent and row.passed, row


def test_a_drill_that_went_wrong_does_not_pass() -> None:
    good = Row("x", sent=2, answered=1, dropped=1, run_twice=1, two_answers=0, recovery_s=5.9, lease_s=1.0)
    assert good.passed
    for change in ({"answered": 0}, {"two_answers": 1}, {"recovery_s": 6.1}, {"dropped": 0}):
        assert not Row(**{**vars(good), **change}).passed  # type: ignore[arg-type]


def test_changed_payloads_are_valid_or_refused() -> None:
    verdicts = hostile.fuzz(2_000, seed=1)
    assert sum(verdicts.values()) == 2_000
    assert verdicts["valid"] > 100 and verdicts["invalid_request"] > 100 and verdicts["malformed_payload"] > 100


def test_a_section_is_replaced_and_nothing_else(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("report") / "r.md"
    begin, end = "<!-- soak: written by make soak -->\n", "<!-- end of soak -->\n"
    path.write_text(f"before\n{begin}old\n{end}after\n")
    replace_section(path, "soak", table(("a", "b"), [(1, 2)]))
    assert path.read_text() == f"before\n{begin}\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n{end}after\n"
