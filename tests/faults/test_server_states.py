"""A server that is there and cannot serve yet: still loading its data, or a replica that takes no writes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from producer import Client, ServerUnavailable
from tests.servers import IMAGE, QUESTIONS, OwnServer, Place, free_port, server_binary, wait_until


@contextlib.contextmanager
def running(server: OwnServer) -> Iterator[OwnServer]:
    try:
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


def test_a_loading_server_is_waited_for_by_workers_and_clients(place: Place, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with running(OwnServer(tmp_path / "data", server_binary())) as server:
        server.start()
        here = replace(place, url=server.url)
        with here.client() as client:
            waiting = client.submit(IMAGE, QUESTIONS)
        for number in range(40):
            here.redis.set(f"filler:{number}", os.urandom(2000))
        here.redis.save()
        server.kill()
        # Two of the servers' own test settings: 20 ms a key, and requests looked at meanwhile.
        server.options = ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
        server.start(wait=False)
        wait_until(lambda: is_loading(here), "the server to load")
        with here.process(ready=False), here.client() as client:
            assert client.result(waiting).ok and client.decide(IMAGE, QUESTIONS).ok


def is_loading(place: Place) -> bool:
    try:
        redis.Redis.from_url(place.url, retry=None).ping()
    except redis.BusyLoadingError:
        return True
    except redis.ConnectionError:
        return False
    raise AssertionError("it had loaded before it could be asked")


def test_a_replica_is_waited_for_and_that_is_said_once(
    place: Place, own_server: OwnServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "replica").mkdir()
    options = ("--replicaof", "127.0.0.1", str(own_server.port), "--repl-diskless-sync-delay", "0")
    with running(OwnServer(tmp_path / "replica", server_binary(), options=options)) as replica:
        replica.start()
        here = replace(place, url=replica.url)
        worker = here.worker()
        thread = threading.Thread(target=worker.work, daemon=True)
        thread.start()
        wait_until(lambda: "cannot take a job" in caplog.text, "the worker to say what it waits for")
        tries = int(here.redis.info("commandstats").get("cmdstat_eval", {}).get("rejected_calls", 0))
        wait_until(lambda: rejected(here) > tries + 2, "the worker to try again")
        here.redis.replicaof("NO", "ONE")
        with here.client() as client:
            assert client.decide(IMAGE, QUESTIONS).ok
        worker.stop()
        thread.join(20)
    assert caplog.text.count("cannot take a job") == 1 and "read only replica" in caplog.text
    assert "the server is back" in caplog.text


def test_a_cluster_is_refused(place: Place, tmp_path: Path) -> None:
    """Braces in the prefix do not help: RQ's keys have no prefix."""
    (tmp_path / "cluster").mkdir()
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with running(OwnServer(tmp_path / "cluster", server_binary(), options=options)) as server:
        server.start()
        server_redis = redis.Redis.from_url(server.url)
        server_redis.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        here = replace(place, url=server.url)
        wait_until(lambda: server_redis.execute_command("CLUSTER INFO")["cluster_state"] == "ok", "the cluster")
        with here.process(ready=False) as process:
            output, _ = process.communicate(timeout=20)
        assert process.returncode == 2 and "part of a Redis Cluster" in output
        with (
            Client(server.url, prefix="{cua}:", queue=place.queue, reconnect_s=0.1) as client,
            pytest.raises(ServerUnavailable, match=r"(?i)same slot"),
        ):
            client.submit(IMAGE, QUESTIONS)


def rejected(place: Place) -> int:
    """How many scripts the replica refused."""
    found = place.redis.info("commandstats")["cmdstat_eval"]
    return int(found.get("rejected_calls", 0)) + int(found.get("failed_calls", 0))
