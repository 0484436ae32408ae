"""What a client may count on: one job an id, bounds, deadlines, taking back, and a server that fails it."""

from __future__ import annotations

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image

from producer.aio import AsyncClient
from producer.client import Client
from producer.errors import (
    DuplicateId,
    MalformedResult,
    QueueFull,
    RequestRefused,
    ResultTimeout,
    ServerUnavailable,
    UnknownJob,
)
from tests.proxy import Proxy
from tests.servers import IMAGE, QUESTIONS, OwnServer, Place, asking, free_port


def test_the_same_id_and_bytes_are_one_job(any_place: Place) -> None:
    """While it waits, while it runs, and when it has ended."""
    place, one = any_place, any_place.id("one")
    with place.client() as client:
        first = client.submit(IMAGE, asking("sleep 0.3"), job_id=one)
        assert client.submit(IMAGE, asking("sleep 0.3"), job_id=one) == first
        assert place.redis.lrange(place.keys.queue, 0, -1) == [one]
        with place.working() as worker:
            place.wait_running(one)
            assert client.submit(IMAGE, asking("sleep 0.3"), job_id=one) == first
            result = client.result(one)
            again = client.decide(IMAGE, asking("sleep 0.3"), job_id=one)
            assert result.ok and again == result
            assert worker._engine.decided == ["sleep 0.3"]  # type: ignore[union-attr]


def test_the_same_id_with_other_bytes_is_refused(any_place: Place) -> None:
    place, one = any_place, any_place.id("one")
    with place.client() as client:
        client.submit(IMAGE, asking("sleep 0.3"), job_id=one)
        stored = place.record(one)
        with pytest.raises(DuplicateId, match=one):
            client.submit(IMAGE + b"!", asking("sleep 0.3"), job_id=one)
        assert place.record(one) == stored
        with place.working():
            place.wait_running(one)
            with pytest.raises(DuplicateId):
                client.submit(IMAGE + b"!", asking("sleep 0.3"), job_id=one)
            result = client.result(one)
            with pytest.raises(DuplicateId):
                client.submit(IMAGE, asking("other"), job_id=one)
            assert result.ok and client.result(one) == result
        assert not place.redis.keys(f"{place.prefix}staged:*"), "a refused payload is not left behind"


def test_a_full_queue_refuses_and_stores_nothing(any_place: Place) -> None:
    place, third = any_place, any_place.id("third")
    with place.client(max_waiting_jobs=2) as client:
        ids = [client.submit(IMAGE, QUESTIONS) for _ in range(2)]
        keys = set(place.redis.keys(f"{place.prefix}*"))
        with pytest.raises(QueueFull, match="2 jobs") as refusal:
            client.submit(IMAGE, QUESTIONS, job_id=third)
        assert refusal.value.retry_after_s > 0
        assert set(place.redis.keys(f"{place.prefix}*")) == keys and not place.redis.exists(place.keys.rq_job(third))
        with place.working():
            assert [client.result(job_id).ok for job_id in ids] == [True, True]
            assert client.decide(IMAGE, QUESTIONS, job_id=third).ok, "room again"


def test_waiting_bytes_are_bounded_too(place: Place) -> None:
    with place.client(max_waiting_bytes=3 * len(IMAGE)) as client:
        client.submit(IMAGE, QUESTIONS)
        client.submit(IMAGE, QUESTIONS)
        with pytest.raises(QueueFull):
            client.submit(IMAGE, QUESTIONS)


def test_expired_jobs_make_room(place: Place) -> None:
    with place.client(max_waiting_jobs=1) as client:
        late = client.submit(IMAGE, QUESTIONS, deadline_s=0.01)
        asyncio.run(asyncio.sleep(0.02))
        client.submit(IMAGE, QUESTIONS)
        assert client.result(late).status == "expired"


def test_a_passed_deadline_is_told_without_any_worker(any_place: Place) -> None:
    with any_place.client() as client:
        result = client.decide(IMAGE, QUESTIONS, deadline_s=0.1)
        assert result.status == "expired" and result.error is not None and result.error.code == "expired"
        assert result.timings.prepare_ms is None and result.attempts == 0
    assert not any_place.redis.exists(any_place.keys.payload(result.job_id))
    assert any_place.redis.llen(any_place.keys.queue) == 0


def test_an_expired_job_never_reaches_the_engine(place: Place) -> None:
    with place.client() as client:
        late = client.submit(IMAGE, asking("late"), deadline_s=0.01)
        good = client.submit(IMAGE, asking("good"))
        asyncio.run(asyncio.sleep(0.02))
        with place.working() as worker:
            assert client.result(good).ok
            assert worker._engine.decided == ["good"]  # type: ignore[union-attr]
        assert client.result(late).status == "expired"


def test_cancelling(any_place: Place) -> None:
    place = any_place
    with place.client() as client:
        waiting = client.submit(IMAGE, QUESTIONS)
        assert client.cancel(waiting) is True
        result = client.result(waiting)
        assert result.status == "cancelled" and result.error is not None and result.error.code == "cancelled"
        assert not place.redis.exists(place.keys.payload(waiting)) and place.redis.llen(place.keys.queue) == 0
        assert client.cancel(waiting) is False, "it has ended"
        with pytest.raises(UnknownJob):
            client.cancel("nothing")
        with place.working():
            running = client.submit(IMAGE, asking("sleep 0.3"))
            place.wait_running(running)
            assert client.cancel(running) is True
            assert client.result(running).status == "cancelled"
            assert client.decide(IMAGE, QUESTIONS).ok


def test_an_unknown_job_is_told_at_once(place: Place) -> None:
    with place.client() as client, pytest.raises(UnknownJob):
        client.result("never-submitted", timeout_s=3600)


def test_a_wait_that_takes_too_long(place: Place) -> None:
    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
        with pytest.raises(ResultTimeout):
            client.result(job_id, timeout_s=0.1)
        with place.working():
            assert client.result(job_id).ok, "the job went on"


def test_giving_up_takes_the_job_back(place: Place) -> None:
    mine, shared = place.id("mine"), place.id("shared")
    with place.client() as client:
        with pytest.raises(ResultTimeout):
            client.decide(IMAGE, QUESTIONS, job_id=mine, timeout_s=0.1)
        assert client.result(mine).status == "cancelled"
        client.submit(IMAGE, QUESTIONS, job_id=shared)
        with pytest.raises(ResultTimeout):
            client.decide(IMAGE, QUESTIONS, job_id=shared, timeout_s=0.1)
        assert place.redis.lrange(place.keys.queue, 0, -1) == [shared], "somebody else's job stays"


def test_submitting_counts_against_the_timeout(place: Place) -> None:
    mine = place.id("mine")
    with place.client() as client:
        with pytest.raises(ResultTimeout):
            client.decide(IMAGE, QUESTIONS, job_id=mine, timeout_s=1e-6)
        assert client.result(mine).status == "cancelled"
    port = free_port()
    with Client(f"redis://127.0.0.1:{port}/0", reconnect_s=3600) as client, pytest.raises(ServerUnavailable):
        client.decide(IMAGE, QUESTIONS, timeout_s=0.1)


async def test_a_cancelled_task_takes_its_job_back(place: Place) -> None:
    mine = place.id("mine")
    async with place.async_client() as client:
        task = asyncio.create_task(client.decide(IMAGE, QUESTIONS, job_id=mine))
        while not place.redis.exists(place.keys.payload(mine)):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.result(mine)).status == "cancelled"


async def test_many_tasks_share_an_async_client(place: Place) -> None:
    with place.working():
        async with place.async_client() as client:
            results = await asyncio.gather(*(client.decide(IMAGE + bytes([n]), QUESTIONS) for n in range(20)))
            with pytest.raises(UnknownJob):
                await client.cancel("nothing")
            assert await client.cancel(results[0].job_id) is False
    assert all(result.ok for result in results) and len({result.body for result in results}) == 20


@pytest.mark.parametrize("job_id", ["", "a b", "a:b", "x" * 65, "ä", "a\n", "../x"])
def test_a_malformed_id_is_refused(place: Place, job_id: str) -> None:
    with place.client() as client:
        for operation in (client.result, client.cancel, lambda id: client.submit(IMAGE, QUESTIONS, job_id=id)):
            with pytest.raises(RequestRefused, match="job_id"):
                operation(job_id)


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), 1e9])
def test_a_deadline_out_of_range_is_refused(place: Place, deadline_s: float) -> None:
    with place.client() as client, pytest.raises(ValueError, match="deadline_s"):
        client.submit(IMAGE, QUESTIONS, deadline_s=deadline_s)


def test_an_invalid_request_is_refused_before_anything_is_sent(place: Place) -> None:
    with place.client() as client, pytest.raises(RequestRefused) as refusal:
        client.submit(b"", {"q": {"type": "score", "instructions": 1, "criteria": {}}})
    assert {"questions.q.type", "questions.q.instructions", "questions.q.criteria"} <= {
        fault.loc for fault in refusal.value.errors
    }
    assert not place.redis.keys(f"{place.prefix}*")


def test_images_in_every_form(place: Place, tmp_path: Path) -> None:
    picture = Image.new("RGB", (3, 2), (1, 2, 3))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    png = buffer.getvalue()
    file = tmp_path / "shot.png"
    file.write_bytes(png)
    with place.working(), place.client() as client:
        bodies = [client.decide(form, QUESTIONS).body for form in (png, bytearray(png), file, str(file), picture)]
        assert len(set(bodies)) == 1
        assert client.decide(Image.new("CMYK", (3, 2)), QUESTIONS).ok, "a mode that PNG has not is converted"
        with pytest.raises(FileNotFoundError):
            client.submit(tmp_path / "none.png", QUESTIONS)


def test_a_foreign_result_is_called_malformed(place: Place) -> None:
    place.redis.hset(place.keys.result("odd"), mapping={"status": "great", "body": "{}"})
    with place.client() as client, pytest.raises(MalformedResult):
        client.result("odd")


def test_a_stream_without_a_result_neither_ends_nor_hastens_the_wait(place: Place) -> None:
    def reads() -> int:
        return int(place.redis.info("commandstats").get("cmdstat_xread", {}).get("calls", 0))

    with place.client() as client:
        job_id = client.submit(IMAGE, QUESTIONS)
        place.redis.xadd(place.keys.stream(job_id), {"type": "1"})
        before = reads()
        with pytest.raises(ResultTimeout):
            client.result(job_id, timeout_s=0.3)
        assert reads() - before <= 4


def test_no_server_is_told_without_the_password() -> None:
    port = free_port()
    for url in (f"redis://user:hunter2@127.0.0.1:{port}/0", "redis://:hunter2@127.0.0.1:1/0"):
        with Client(url, reconnect_s=0.1) as client, pytest.raises(ServerUnavailable) as refusal:
            client.cancel("x")
        assert "hunter2" not in str(refusal.value) and "127.0.0.1" in str(refusal.value)


async def test_no_server_is_told_to_tasks() -> None:
    async with AsyncClient(f"redis://127.0.0.1:{free_port()}/0", reconnect_s=0.1) as client:
        with pytest.raises(ServerUnavailable, match="is it running"):
            await client.cancel("x")


# What stands in the commands of each step; a cut at it loses the command or its reply.
STEPS = {"submit": b"known_sha256", "wait": b"XREAD"}


@pytest.mark.parametrize("deliver", [True, False], ids=["reply lost", "command lost"])
@pytest.mark.parametrize("step", STEPS)
def test_a_cut_connection_neither_loses_nor_repeats_a_job(place: Place, step: str, deliver: bool) -> None:
    port = urlsplit(place.url).port
    assert port is not None
    with Proxy(port) as proxy, place.working() as worker:
        cut_off = replace(place, url=proxy.url)
        with cut_off.client() as client:
            proxy.cut(STEPS[step], deliver=deliver)
            assert client.decide(IMAGE, asking("sleep 0.2")).ok
        assert proxy.cuts == 1
        assert worker._engine.decided == ["sleep 0.2"]  # type: ignore[union-attr]


def test_a_client_outlives_a_restart_of_the_server(place: Place, own_server: OwnServer) -> None:
    here = replace(place, url=own_server.url)
    with here.client() as client, ThreadPoolExecutor(1) as pool:
        job_id = client.submit(IMAGE, QUESTIONS)
        waiting = pool.submit(client.result, job_id)
        own_server.kill()
        own_server.start()
        with here.working():
            assert waiting.result().ok
