"""Whoever can write to Redis still cannot make a worker, or `rq info`, run anything; the worker goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.servers import IMAGE, QUESTIONS, ROOT, Place, asking
from tests.worker.audited import EXIT_FORBIDDEN
from tests.worker.forged import DROPPED, REFUSED, Forged, forged_jobs, push
from tests.worker.noop import PNG

OUR_CLASSES = {
    "RQ_JOB_CLASS": "worker.rq_classes.SafeJob",
    "RQ_QUEUE_CLASS": "worker.rq_classes.SafeQueue",
    "RQ_WORKER_CLASS": "worker.GpuWorker",
}


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Exists only if something forged was run."""
    (tmp_path / "planted_module.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\ndef run(*a): pass\n")
    return tmp_path / "canary"


def check_refusal(place: Place, forged: Forged) -> None:
    job_id = forged.job_id.decode()
    fields = place.result(job_id)
    assert fields.get("status") == "invalid", (forged.name, fields)
    body = json.loads(fields["body"])
    assert list(body) == ["code", "detail", "errors"] and forged.says in body["detail"], (forged.name, body)
    assert body["code"] == ("payload_too_large" if forged.name == "big-payload" else "malformed_payload")
    assert body["detail"].isprintable() and len(body["detail"]) < 1000
    assert not place.redis.exists(place.keys.payload(job_id)), forged.name
    if forged.name == "big-payload":
        assert fields["attempts"] == "0", "refused by its size alone, without reading it"
    assert b"system" not in b"".join(place.record(job_id).values()), "nothing of the forgery is kept"


def push_wrong_types(place: Place) -> list[Forged]:
    """A record that is a string, a payload that is a list, a result that is a set."""
    writers = {"rq_job": place.redis.set, "payload": place.redis.rpush, "result": place.redis.sadd}
    found = [Forged(f"wrong-{what}", place.id(f"wrong-{what}").encode(), {}) for what in writers]
    for forged, (what, write) in zip(found, writers.items(), strict=True):
        push(place, forged)
        key = getattr(place.keys, what)(forged.job_id.decode())
        place.redis.delete(key)
        write(key, "x")
    return found


@pytest.mark.parametrize("starter", ["rq worker", "python -m worker run"])
def test_forged_jobs_run_nothing(any_place: Place, canary: Path, starter: str) -> None:
    place = any_place
    hostile = ("-S", "pickle", "-j", "rq.job.Job", "--queue-class", "rq.Queue", "-n", "w")
    command = {
        "rq worker": ("rq", "worker", "-w", "tests.worker.noop.NoopWorker", "-u", place.url, *hostile, place.queue),
        "python -m worker run": ("worker", "run", "--name", "w"),
    }[starter]
    forgeries = list(forged_jobs(place, canary))
    for forged in forgeries:
        push(place, forged)
    forgeries += push_wrong_types(place)
    environment = {"PYTHONPATH": f"{canary.parent}{os.pathsep}{ROOT}"}
    with place.process("-m", "tests.worker.audited", *command, environment=environment) as process:
        with place.client() as client:
            result = client.decide(IMAGE, QUESTIONS)
            assert result.ok, "the worker goes on"
        process.terminate()
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "AUDIT" not in output, output
    assert not canary.exists()
    for forged in forgeries:
        if forged.end == REFUSED:
            check_refusal(place, forged)
        else:
            assert not place.result(forged.job_id.decode("latin-1")), forged.name
    dropped = [line for line in output.splitlines() if "job dropped" in line]
    assert len(dropped) >= sum(forged.end == DROPPED for forged in forgeries)
    assert output.count("\x1b[31m\n") == 0 and "\n\n" not in output
    assert place.redis.llen(place.keys.queue) == 0


@pytest.mark.parametrize("command", ["info", "requeue", "empty"])
def test_rqs_tools_with_our_classes_run_nothing(place: Place, canary: Path, command: str) -> None:
    """Also with forged leases, dependents and registries in their way."""
    forgeries = [forged for forged in forged_jobs(place, canary) if forged.record and forged.end == REFUSED]
    with place.client() as client, place.working():
        ended = client.decide(IMAGE, asking("raise")).job_id
    for forged in forgeries:
        push(place, forged)
        job_id = forged.job_id.decode()
        place.redis.zadd(place.keys.wip, {f"{job_id}:e": 1})
        place.redis.zadd(place.keys.failed, {job_id: 9e9})
        place.redis.sadd(f"rq:job:{job_id}:dependents", job_id)
    arguments = {"info": [place.queue], "requeue": ["--queue", place.queue, ended], "empty": [place.queue]}[command]
    environment = {
        **os.environ, **place.environment, **OUR_CLASSES, "RQ_REDIS_URL": place.url,
        "PYTHONPATH": f"{canary.parent}{os.pathsep}{ROOT}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.audited", "rq", command, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode != EXIT_FORBIDDEN and "AUDIT" not in output, output
    assert "Traceback" not in output and not canary.exists(), output
    expected = {"info": f"{len(forgeries)}, ", "requeue": "Unable to requeue 1 jobs", "empty": "jobs removed"}
    assert expected[command] in output


def test_nobody_on_a_channel_stops_a_worker(place: Place) -> None:
    """RQ's commands to a worker: none is listened to, and the job in hand goes on."""
    with place.process(name="w") as process, place.client() as client:
        job_id = client.submit(IMAGE, asking("sleep 0.3"))
        place.wait_running(job_id)
        for command in ("shutdown", "stop-job", "kill-horse"):
            heard = place.redis.publish("rq:pubsub:w", json.dumps({"command": command, "job_id": job_id}))
            assert heard == 0, "nobody subscribes"
        assert client.result(job_id).ok and client.decide(IMAGE, QUESTIONS).ok
        assert process.poll() is None


def test_the_hook_catches_what_it_shall(place: Place, canary: Path) -> None:
    """The same forged job, run by stock RQ under the hook, is noticed."""
    push(place, next(forged for forged in forged_jobs(place, canary) if forged.name == "pickle-call"))
    environment = {**os.environ, **place.environment}
    command = ["rq", "worker", "-w", "rq.SimpleWorker", "-u", place.url, "--burst", place.queue]
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.audited", *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_FORBIDDEN and "AUDIT" in done.stderr


PAYLOADS = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=50).map(lambda data: b"\x83" + data),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads=st.lists(PAYLOADS, min_size=1, max_size=10), ids=st.lists(st.binary(max_size=70), max_size=5))
def test_any_bytes_are_answered_or_refused(place: Place, payloads: list[bytes], ids: list[bytes]) -> None:
    """Whatever stands on the queue, it is empty afterwards and every job that was one has its end."""
    jobs = [place.submit_payload(payload) for payload in payloads]
    for entry in ids:
        place.raw.rpush(place.keys.queue, entry)
    place.worker().work(burst=True)
    assert all(place.result(job_id)["status"] == "invalid" for job_id in jobs)
    assert place.raw.llen(place.keys.queue) == 0
    assert not place.redis.keys(f"{place.prefix}job:*")


def test_no_log_holds_an_image_or_a_prompt(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    secret = "a-very-secret-prompt"
    with place.working(), place.client() as client:
        client.decide(PNG + b"secret-pixels", {"q": {"instructions": secret, "criteria": {"a": secret}}})
        client.decide(b"secret-pixels", {"q": {"instructions": secret, "criteria": {"a": secret}}})
    assert caplog.text.count("job ended") == 2 and "secret" not in caplog.text
