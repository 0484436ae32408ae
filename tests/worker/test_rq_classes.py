"""RQ's own tools see our queue: names, records, registries, workers; and their classes are ours."""

from __future__ import annotations

import pytest
import redis
from rq.exceptions import InvalidJobOperationError
from rq.job import Job
from rq.queue import Queue
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.results import Result, get_key
from rq.suspension import WORKERS_SUSPENDED
from rq.worker import BaseWorker
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

from producer.keys import Keys
from producer.scripts import CALL
from tests.servers import IMAGE, QUESTIONS, Place, asking
from worker import GpuWorker
from worker.rq_classes import MsgpackSerializer, SafeJob, SafeQueue


def test_our_names_of_rqs_keys_are_rqs() -> None:
    keys = Keys(queue_name="q")
    assert keys.rq_job("x") == Job.key_for("x") and keys.stream("x") == get_key("x")
    assert keys.queue == f"{Queue.redis_queue_namespace_prefix}q" and keys.queues == Queue.redis_queues_keys
    for ours, registry in ((keys.wip, StartedJobRegistry), (keys.finished, FinishedJobRegistry),
                           (keys.failed, FailedJobRegistry)):  # fmt: skip
        assert ours == registry.key_template.format("q")
    assert keys.rq_worker("w") == f"{BaseWorker.redis_worker_namespace_prefix}w"
    assert keys.rq_workers == REDIS_WORKER_KEYS and keys.rq_queue_workers == WORKERS_BY_QUEUE_KEY % "q"
    assert keys.suspended == WORKERS_SUSPENDED


@pytest.mark.parametrize(("prefix", "queue"), [("a b:", "q"), ("cua:", ""), ("cua:", "q\n"), ("cua:", "a:b")])
def test_names_that_make_no_key_are_refused(prefix: str, queue: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Keys(prefix, queue)


def test_rq_reads_a_job_through_its_whole_life(any_place: Place) -> None:
    place = any_place
    queue = SafeQueue(place.queue, connection=place.raw)
    with place.client() as client:
        job_id = client.submit(IMAGE, asking("sleep 0.3"))
        job = queue.fetch_job(job_id)
        assert isinstance(job, SafeJob) and job.get_status() == "queued" and job.origin == place.queue
        assert job.description == "screenshot decision" and job.enqueued_at is not None
        assert queue.job_ids == [job_id] and queue in Queue.all(connection=place.raw)
        with place.working() as worker:
            place.wait_running(job_id)
            assert job.get_status() == "started" and queue.started_job_registry.get_job_ids() == [job_id]
            shown = [found for found in GpuWorker.all(queue=queue) if found.name == worker.name]
            assert len(shown) == 1 and shown[0].get_state() == "busy" and shown[0].get_current_job_id() == job_id
            assert shown[0].queue_names() == [place.queue]
            client.result(job_id)
            failed_id = client.decide(IMAGE, asking("raise")).job_id
            assert job.get_status() == "finished" and job_id in queue.finished_job_registry
            assert failed_id in queue.failed_job_registry and job_id not in queue.failed_job_registry
            worker_now = GpuWorker.find_by_key(worker.key, place.raw)
            assert worker_now is not None
            assert (worker_now.successful_job_count, worker_now.failed_job_count) == (1, 1)
        kinds = [Result.fetch_latest(stock_job(place, one)) for one in (job_id, failed_id)]
    assert [found.type for found in kinds if found] == [Result.Type.SUCCESSFUL, Result.Type.FAILED]


def stock_job(place: Place, job_id: str) -> Job:
    """RQ's own class reads our record too."""
    return Job.fetch(job_id, connection=place.raw, serializer=MsgpackSerializer)


def test_rqs_clean_up_cannot_end_a_running_job(place: Place) -> None:
    """Stock RQ's clean-up ends what its registry says has been abandoned; our leases are not there."""
    with place.working(), place.client() as client:
        job_id = client.submit(IMAGE, asking("sleep 0.4"))
        place.wait_running(job_id)
        registry = StartedJobRegistry(place.queue, connection=place.raw, serializer=MsgpackSerializer)
        registry.cleanup()
        assert client.result(job_id).ok


def test_nothing_can_be_put_on_the_queue_or_run_through_rq(place: Place) -> None:
    queue = SafeQueue(place.queue, connection=place.raw, job_class=Job, serializer="pickle")
    assert queue.serializer is MsgpackSerializer and queue.job_class is SafeJob
    with pytest.raises(InvalidJobOperationError, match=r"producer\.Client"):
        queue.enqueue("worker.decide")
    with place.client() as client:
        job = queue.fetch_job(client.submit(IMAGE, QUESTIONS))
        assert job is not None
        with pytest.raises(InvalidJobOperationError, match=r"worker\.GpuWorker"):
            job.perform()
        with pytest.raises(InvalidJobOperationError, match="submit it again"):
            job.save()
        assert (job.func, job.success_callback, job.failure_callback, job.stopped_callback) == (None,) * 4


def test_a_constant_is_all_that_a_record_says_of_its_call() -> None:
    assert MsgpackSerializer.loads(CALL) == ["worker.decide", None, [], {}]
    assert MsgpackSerializer.dumps(("worker.decide", None, [], {})) == CALL


def test_emptying_a_queue_answers_its_clients(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUA_PREFIX", place.prefix)
    with place.client() as client:
        ids = [client.submit(IMAGE, QUESTIONS) for _ in range(3)]
        assert SafeQueue(place.queue, connection=redis.Redis.from_url(place.url)).empty() == 3
        assert [client.result(job_id).status for job_id in ids] == ["cancelled"] * 3
