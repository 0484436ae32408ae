"""A supervised worker: restarted when it dies, killed when it hangs, its job with another worker at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.servers import IMAGE, QUESTIONS, OwnServer, Place, asking, wait_until
from worker.loading import device_names
from worker.settings import Settings, SettingsError
from worker.supervise import devices_of, list_devices

QUICK = {"restart_pause_s": 0.05}
# Longer than any test: what frees a job is not its lease's end.
LONG_LEASE = {"lease_s": 60.0, "beat_s": 0.5}


@contextmanager
def supervised(
    place: Place, *options: str, ready: str | None = "w-1", environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`run --supervise`, its first worker ready. Its workers leave with it."""
    place.changes |= QUICK
    options = options or ("--supervise",)
    command = ("-m", "tests.worker.noop", "run", "--name", "w", *options)
    with place.process(*command, environment=environment, ready=False) as process:
        if ready:
            place.wait_ready(ready)
        yield process
        if process.poll() is None:
            process.terminate()
            process.wait(20)


def pid_of(place: Place, name: str) -> int:
    pid = place.redis.hget(place.keys.worker(name), "pid")
    assert isinstance(pid, str), f"worker {name} is not listed"
    return int(pid)


def is_alive(pid: int) -> bool:
    """Whether it is a process, and not a dead one that nobody has asked after."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_workers_job_is_free_long_before_its_lease_ends_and_no_other_is(place: Place) -> None:
    place.changes |= LONG_LEASE
    with supervised(place), place.process(name="other"), place.client() as client:
        for _ in range(2):
            place.wait_running(client.submit(IMAGE, asking("sleep 1.5")))
        jobs = {place.redis.hget(place.keys.worker(name), "job"): name for name in ("w-1", "other")}
        leases = {name: place.redis.hget(place.keys.rq_job(str(job)), "lease") for job, name in jobs.items()}
        (job_id,) = (str(job) for job, name in jobs.items() if name == "w-1")
        os.kill(pid_of(place, "w-1"), signal.SIGKILL)
        wait_until(lambda: place.redis.hget(place.keys.rq_job(job_id), "lease") != leases["w-1"], "it to be free", 20)
        results = {name: client.result(str(job)) for job, name in jobs.items()}
        assert (results["other"].attempts, results["other"].worker) == (1, "other")
        assert results["w-1"].attempts == 2 and results["w-1"].worker in ("other", "w-2")
        place.wait_ready("w-2")
        buried = place.redis.hgetall(place.keys.worker("w-1"))
        assert buried["state"] == "failed" and "SIGKILL" in buried["error"] and "job" not in buried
        assert not place.redis.sismember(place.keys.rq_queue_workers, place.keys.rq_worker("w-1"))


def test_the_job_that_a_killed_worker_had_prepared_is_free_too_and_keeps_its_place(place: Place) -> None:
    place.changes |= LONG_LEASE
    with supervised(place), place.client() as client:
        running, ahead = (client.submit(IMAGE, asking(f"sleep {seconds}")) for seconds in ("0.8", "0.01"))
        place.wait_running(running)
        place.wait_running(ahead)
        os.kill(pid_of(place, "w-1"), signal.SIGKILL)
        results = [client.result(job_id) for job_id in (running, ahead)]
    assert [(result.attempts, result.worker) for result in results] == [(2, "w-2"), (1, "w-2")]
    assert str(results[0].finished_at) < str(results[1].finished_at)


def test_a_job_that_kills_every_worker_ends_and_the_supervisor_does_not(place: Place) -> None:
    place.changes |= LONG_LEASE
    with supervised(place) as process, place.client() as client:
        result = client.decide(IMAGE, asking("kill"))
        assert result.error is not None and (result.error.code, result.attempts) == ("worker_lost", 3)
        assert client.decide(IMAGE, QUESTIONS).worker == "w-4"
        assert process.poll() is None


@pytest.mark.parametrize("stop", ["paused", "hang holding"])
def test_a_worker_whose_beat_stops_is_killed(place: Place, stop: str) -> None:
    """A paused process, and one in which a call keeps the interpreter's lock."""
    place.changes |= {"lease_s": 0.6, "beat_s": 0.2}
    with supervised(place, environment={"NOOP_HANGS": "1"}), place.client() as client:
        first = pid_of(place, "w-1")
        if stop == "paused":
            os.kill(first, signal.SIGSTOP)
        else:
            job_id = client.submit(IMAGE, asking(stop))
            place.wait_running(job_id)
            client.cancel(job_id)  # so that it hangs no other
        wait_until(lambda: not is_alive(first), "the hung worker to be killed")
        assert client.decide(IMAGE, QUESTIONS).worker != "w-1"


def test_nobody_is_killed_for_a_server_that_is_away(place: Place, own_server: OwnServer) -> None:
    place = replace(place, url=own_server.url, changes={"lease_s": 1.0, "beat_s": 0.2})
    with supervised(place), place.client() as client:
        worker = pid_of(place, "w-1")
        own_server.kill()
        time.sleep(2.5)  # longer than two leases
        assert is_alive(worker)
        own_server.start()
        assert client.decide(IMAGE, QUESTIONS).worker == "w-1"
        wait_until(lambda: place.redis.hexists(place.keys.worker("w-1"), "pid"), "the worker's next beat")
        assert pid_of(place, "w-1") == worker


def test_the_first_signal_finishes_the_job_and_the_worker_is_not_started_again(place: Place) -> None:
    with supervised(place) as process, place.client() as client:
        job_id = client.submit(IMAGE, asking("sleep 0.8"))
        place.wait_running(job_id)
        process.terminate()
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 0, output
        assert client.result(job_id).attempts == 1
    assert not place.redis.keys(f"{place.prefix}worker:*")


def test_the_second_signal_ends_it_now_and_the_job_is_free(place: Place) -> None:
    place.changes |= LONG_LEASE
    with supervised(place) as process, place.client() as client:
        job_id = client.submit(IMAGE, asking("sleep 60"))
        place.wait_running(job_id)
        process.terminate()
        wait_until(lambda: place.state("w-1") == "draining", "the first signal to be heard")
        process.terminate()
        assert process.wait(timeout=5) == 128 + signal.SIGKILL
        assert place.redis.lrange(place.keys.queue, 0, -1) == [job_id]


def test_a_worker_that_hangs_when_it_shall_leave_is_killed(place: Place) -> None:
    place.changes |= LONG_LEASE
    with supervised(place) as process:
        os.kill(pid_of(place, "w-1"), signal.SIGSTOP)
        process.terminate()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 128 + signal.SIGKILL


def test_a_worker_outlives_its_supervisor_only_for_its_job(place: Place) -> None:
    with supervised(place) as process, place.client() as client:
        job_id = client.submit(IMAGE, asking("sleep 0.8"))
        place.wait_running(job_id)
        worker = pid_of(place, "w-1")
        process.kill()
        assert client.result(job_id).attempts == 1
        wait_until(lambda: not is_alive(worker), "the worker to leave")


def test_starts_that_fail_are_given_up_with_the_workers_exit_code(place: Place) -> None:
    with supervised(place, ready=None, environment={"NOOP_WARM_UP": "fail"}) as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 4
    assert output.count("worker starting") == 5 and "not started again" in output
    pauses_s = [float(pause) for pause in re.findall(r"starts in ([0-9.]+) s", output)]
    assert len(pauses_s) == 4 and max(pauses_s) <= 0.05 * 2**4 + 0.05


@pytest.mark.parametrize(("how", "code"), [("pin", 3), ("usage", 2)])
def test_what_a_restart_cannot_cure_is_given_up_at_once(place: Place, how: str, code: int) -> None:
    with supervised(place, ready=None, environment={"NOOP_WARM_UP": how}) as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode == code and output.count("worker starting") == 1


def test_burst_ends_the_supervisor_too(place: Place) -> None:
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
        with supervised(place, "--supervise", "--burst", ready=None) as process:
            assert process.wait(timeout=20) == 0
        assert client.result(job_id).worker == "w-1"


def test_one_worker_a_device(place: Place) -> None:
    with supervised(place, "--devices", "all", ready="w-cuda0-1") as process:
        place.wait_ready("w-cuda1-1")
        for index in (0, 1):
            assert place.redis.hget(place.keys.worker(f"w-cuda{index}-1"), "device") == f"cuda:{index}"
        os.kill(pid_of(place, "w-cuda0-1"), signal.SIGKILL)
        place.wait_ready("w-cuda0-2")
        assert place.state("w-cuda1-1") == "ready"
        process.terminate()
        assert process.wait(timeout=20) == 0


def test_a_device_that_is_given_up_does_not_stop_the_others(place: Place) -> None:
    with supervised(place, "--devices", "all", ready="w-cuda0-1", environment={"NOOP_BROKEN": "cuda:1"}) as process:
        wait_until(lambda: place.state("w-cuda1-1") == "failed", "the other one to fail")
        broken = Path(f"/proc/{pid_of(place, 'w-cuda1-1')}")
        wait_until(lambda: not broken.exists(), "the supervisor to take notice")
        with place.client() as client:
            assert client.decide(IMAGE, QUESTIONS).worker == "w-cuda0-1"
        process.terminate()
        assert process.wait(timeout=20) == 3


@pytest.mark.parametrize("devices", ["", "tpu", "cuda:0,cuda:0", "cuda:0,,cpu"])
def test_devices_are_named_once_each(devices: str) -> None:
    with pytest.raises(SettingsError, match="--devices"):
        devices_of(devices, list)
    assert devices_of("cuda:1, cpu", list) == ["cuda:1", "cpu"]


def test_all_devices_are_those_that_torch_sees() -> None:
    assert list_devices() == device_names()


def test_devices_that_cannot_be_listed_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SettingsError, match="name them instead"):
        list_devices()


def test_a_device_or_several(place: Place) -> None:
    command = ("-m", "tests.worker.noop", "run", "--device", "cpu", "--devices", "all")
    with place.process(*command, ready=False) as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 2 and "exclude each other" in output


def test_settings_survive_the_environment() -> None:
    settings = Settings(queue="q", device="cuda:1", lease_s=0.75, beat_s=0.1, eager=True, image_cache_bytes=0)
    assert Settings.from_environment(settings.to_environment()) == settings
