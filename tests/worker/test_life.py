"""A worker's life: what comes before its first job, signals, ends, one worker a device."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from tests.servers import IMAGE, QUESTIONS, ROOT, OwnServer, Place, asking, free_port, wait_until
from tests.worker.noop import NoopEngine, NoopWorker
from worker.answer import Report
from worker.lock import Device, DeviceLock, DeviceTaken
from worker.settings import Settings, SettingsError


class SteppedWorker(NoopWorker):
    """Starts one phase after another, each when the test says so."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.may_go_on = threading.Semaphore(0)

    def load_engine(self, device: Device, report: Report) -> NoopEngine:
        for phase in ("verify", "load"):
            report(phase, 1, 4)
            self.may_go_on.acquire()
        may_go_on = self.may_go_on

        class SteppedEngine(NoopEngine):
            def warm_up(self, report: Report) -> None:
                may_go_on.acquire()

        return SteppedEngine()


def test_no_job_is_taken_before_the_worker_is_ready(place: Place) -> None:
    place.changes["beat_s"] = 0.2
    worker = place.worker(SteppedWorker)
    assert isinstance(worker, SteppedWorker)
    thread = threading.Thread(target=worker.work, daemon=True)
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
        thread.start()
        for state in ("verifying", "loading", "warming"):
            wait_until(lambda state=state: place.state(worker.name) == state, state)  # type: ignore[misc]
            if state != "warming":
                wait_until(lambda: place.redis.hget(place.keys.worker(worker.name), "progress") == "25%", "progress")
            first = place.redis.hget(place.keys.worker(worker.name), "last_beat")
            wait_until(
                lambda first=first: place.redis.hget(place.keys.worker(worker.name), "last_beat") != first, "a beat"
            )  # type: ignore[misc]
            assert place.redis.lrange(place.keys.queue, 0, -1) == [job_id]
            worker.may_go_on.release()
        assert client.result(job_id).ok
        assert place.state(worker.name) == "ready"
    worker.stop()
    thread.join()


def test_a_busy_worker_says_so(place: Place) -> None:
    with place.working() as worker, place.client() as client:
        job_id = client.submit(IMAGE, asking("sleep 0.3"))
        place.wait_running(job_id)
        shown = place.redis.hgetall(place.keys.worker(worker.name))
        assert (shown["state"], shown["job"]) == ("busy", job_id)
        client.result(job_id)
        assert "job" not in place.redis.hgetall(place.keys.worker(worker.name))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_an_idle_worker_leave_soon(place: Place, number: signal.Signals) -> None:
    with place.process() as process:
        sent_s = time.monotonic()
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 0, output
        assert time.monotonic() - sent_s < 5.0  # one second of a blocking pop; the rest is for a busy machine
    assert not place.redis.exists(place.keys.worker("w"))


def test_the_first_signal_finishes_the_job_in_hand_and_takes_no_other(place: Place) -> None:
    with place.process() as process, place.client() as client:
        running = client.submit(IMAGE, asking("sleep 0.8"))
        place.wait_running(running)
        waiting = client.submit(IMAGE, QUESTIONS)
        process.terminate()
        assert client.result(running).ok
        assert process.wait(timeout=20) == 0
        assert place.redis.lrange(place.keys.queue, 0, -1) == [waiting]


def test_the_second_signal_ends_it_at_once_and_the_job_comes_back(place: Place) -> None:
    place.changes |= {"lease_s": 1.0, "beat_s": 0.25}
    with place.process() as process, place.client() as client:
        job_id = client.submit(IMAGE, asking("sleep 30"), deadline_s=2.5)
        place.wait_running(job_id)
        process.terminate()
        wait_until(lambda: place.state("w") == "draining", "the first signal to be heard")
        process.terminate()
        assert process.wait(timeout=5) == -signal.SIGTERM
        # Nobody is left to take it: the lease ends, then the deadline passes.
        result = client.result(job_id)
    assert (result.status, result.attempts) == ("expired", 1)


def test_a_signal_while_it_starts_ends_it_at_once(place: Place) -> None:
    with place.process(environment={"NOOP_LOAD_S": "60"}, ready=False) as process:
        wait_until(lambda: place.state("w") == "verifying", "the start")
        process.terminate()
        assert process.wait(timeout=5) == 0
    assert not place.redis.exists(place.keys.worker("w"))


def test_a_failed_warm_up_ends_it_with_its_reason(place: Place) -> None:
    with place.process(environment={"NOOP_WARM_UP": "fail"}, ready=False) as process, place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 4 and "did not add up" in output
        assert place.state("w") == "failed"
        assert "did not add up" in str(place.redis.hget(place.keys.worker("w"), "error"))
        assert place.redis.lrange(place.keys.queue, 0, -1) == [job_id], "no job was touched"


def test_a_lost_device_ends_it_after_the_job_is_answered(place: Place) -> None:
    with place.process(environment={"NOOP_ABORTS": "1"}) as process, place.client() as client:
        result = client.decide(IMAGE, asking("fatal"))
        assert result.error is not None and result.error.code == "inference_failed"
        assert process.wait(timeout=20) == 5
    assert place.state("w") == "failed"


def test_a_second_worker_on_the_device_is_refused_with_the_firsts_name(place: Place) -> None:
    place.changes["device"] = "cuda:7"
    with place.process(name="first"):
        command = ["-m", "tests.worker.noop", "run", "--name", "second"]
        with place.process(*command, ready=False) as second:
            output, _ = second.communicate(timeout=20)
            assert second.returncode == 2 and "cuda:7" in output and "first" in output
    with place.process(name="third"):
        pass


def test_the_lock_is_free_again(tmp_path: Path) -> None:
    lock = DeviceLock(tmp_path, "cuda:0", "one")
    with pytest.raises(DeviceTaken, match=r"cuda:0 .* one \(pid"):
        DeviceLock(tmp_path, "cuda:0", "two")
    DeviceLock(tmp_path, "cuda:1", "two").release()
    lock.release()
    DeviceLock(tmp_path, "cuda:0", "two").release()


def test_a_server_that_evicts_is_refused(place: Place, own_server: OwnServer) -> None:
    redis.Redis.from_url(own_server.url).config_set("maxmemory-policy", "allkeys-lru")
    here = replace(place, url=own_server.url)
    worker = here.worker()
    with pytest.raises(SystemExit):
        worker.work()
    assert worker.exit_code == 2 and here.state(worker.name) == "failed"
    assert "noeviction" in str(here.redis.hget(here.keys.worker(worker.name), "error"))


def test_a_server_that_stays_away_ends_it(place: Place) -> None:
    place.changes["patience_s"] = 0.3
    worker = replace(place, url=f"redis://127.0.0.1:{free_port()}/0").worker()
    with pytest.raises(SystemExit):
        worker.work()
    assert worker.exit_code == 1


def test_burst_leaves_when_the_queue_is_empty(place: Place) -> None:
    with place.client() as client:
        ids = [client.submit(IMAGE, QUESTIONS) for _ in range(3)]
        assert place.worker().work(burst=True) is True
        assert all(client.result(job_id).ok for job_id in ids)
    assert place.worker().work(burst=True) is False
    assert place.worker().work(max_idle_time=0) is False


def test_settings_come_from_the_environment() -> None:
    found = Settings.from_environment({"CUA_QUEUE": "q", "CUA_LEASE_S": "40", "CUA_MAX_ATTEMPTS": "5", "OTHER": "x"})
    assert (found.queue, found.lease_s, found.max_attempts, found.beat_s) == ("q", 40.0, 5, 5.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEASE_S", "soon"),
        ("MAX_ATTEMPTS", "1.5"),
        ("RESULT_TTL_S", "0"),
        ("LEASE_S", "6"),
        ("QUEUE", "a b"),
        ("DEVICE", "tpu"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as error:
        Settings.from_environment({f"CUA_{name}": value})
    assert name.lower() in str(error.value).lower() and value in str(error.value)


def test_a_workers_name_is_fit_for_keys_and_logs(place: Place) -> None:
    with pytest.raises(SettingsError, match="worker name"):
        place.worker(name="a\nb")


def test_one_queue_a_worker(place: Place) -> None:
    with pytest.raises(SettingsError, match="one queue"):
        NoopWorker(["a", "b"], connection=redis.Redis.from_url(place.url))


def test_the_package_and_its_help_load_no_torch() -> None:
    code = (
        "import sys, worker, worker.rq_classes; worker.GpuWorker; import worker.__main__ as m; m.build_parser(); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
