"""A worker that hangs ends itself and says where; its job is another worker's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.servers import IMAGE, ROOT, Place, asking

LIMITS = {"lease_s": 0.4, "beat_s": 0.1, "stage_limit_s": 0.3}
HANGS = {"NOOP_HANGS": "1"}
SECRET = "the words of a prompt"
# The second keeps the interpreter's lock, as a GPU call may; the first lets it go, so the beat goes on.
WAYS = ["hang sleeping", "hang holding"]


@pytest.mark.parametrize("way", WAYS)
def test_a_hung_worker_ends_itself_and_another_one_answers(place: Place, way: str) -> None:
    place.changes |= LIMITS
    with place.client() as client, place.process(environment=HANGS) as process:
        job_id = client.submit(IMAGE, asking(f"{way} {SECRET}"))
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 1
        with place.working() as second:
            result = client.result(job_id)
    assert "Timeout" in output and "_obey" in output, "where it hung"
    assert SECRET not in output
    assert (result.status, result.attempts, result.worker) == ("ok", 2, second.name)


def test_a_job_that_hangs_every_worker_ends(place: Place) -> None:
    place.changes |= LIMITS
    with place.client() as client:
        job_id = client.submit(IMAGE, asking("hang sleeping"))
        for name in ("one", "two", "three"):
            with place.process(name=name, environment=HANGS, ready=False) as process:
                assert process.wait(timeout=20) == 1
        result = client.result(job_id)
    assert result.error is not None and (result.status, result.error.code) == ("failed", "worker_lost")
    assert result.attempts == 3


def test_a_job_within_the_limit_and_the_wait_for_the_next_one_end_nothing(place: Place) -> None:
    place.changes |= {"stage_limit_s": 0.8}
    with place.client() as client, place.process() as process:
        for _ in range(2):
            job_id = client.submit(IMAGE, asking("sleep 0.5"))
            assert client.result(job_id).ok
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.9)


def test_a_start_that_hangs_ends(place: Place) -> None:
    place.changes |= {"start_limit_s": 0.3}
    with place.process(environment={"NOOP_LOAD_S": "60"}, ready=False) as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "load_engine" in output


def test_the_stage_that_ends_first_sets_the_timer_whichever_began_first() -> None:
    code = (
        "import time; from worker.watchdog import limited\n"
        "with limited(60):\n"
        "    with limited(30): pass\n"
        "    with limited(0.1):\n"
        "        with limited(40): pass\n"
        "        time.sleep(20)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=15, check=False
    )
    assert done.returncode == 1 and "line 6" in done.stderr
