"""A server whose memory is bounded: checked at the start, and a full queue is still worked off."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import yaml

from producer.errors import QueueFull
from producer.limits import MAX_WAITING_BYTES
from tests.servers import QUESTIONS, ROOT, OwnServer, Place
from tests.worker.noop import PNG
from worker.embedded import MAX_MEMORY
from worker.link import Link, needed_memory_bytes, own_client
from worker.settings import Settings, SettingsError

MIB = 2**20


def check(place: Place) -> None:
    Link(own_client(redis.Redis.from_url(place.url)), place.settings, "w").check_server()


def test_a_server_with_too_little_memory_is_refused_with_the_numbers(place: Place, own_server: OwnServer) -> None:
    here = replace(place, url=own_server.url, changes={"max_waiting_bytes": 8 * MIB})
    needed = needed_memory_bytes(8 * MIB)
    for allowed in ("0", str(needed)):
        here.redis.config_set("maxmemory", allowed)
        check(here)
    here.redis.config_set("maxmemory", str(needed - 1))
    with pytest.raises(SettingsError) as error:
        check(here)
    for part in (f"{needed - 1:,}", f"{needed:,}", f"{8 * MIB:,}", "maxmemory", "CUA_MAX_WAITING_BYTES"):
        assert part in str(error.value)


def test_a_full_queue_is_worked_off(place: Place, own_server: OwnServer) -> None:
    """Filled to its bound at the least memory that a worker accepts: it starts, answers all, and more can come.

    Jobs of 3 MiB are what the server stores least tightly.
    """
    bound = 32 * MIB
    here = replace(place, url=own_server.url, changes={"max_waiting_bytes": bound})
    here.redis.config_set("maxmemory", str(needed_memory_bytes(bound)))
    ids: list[str] = []
    with here.client(max_waiting_bytes=bound) as client:
        with pytest.raises(QueueFull, match="jobs with") as refusal:
            for _ in range(100):
                ids.append(client.submit(PNG + os.urandom(3 * MIB), QUESTIONS, deadline_s=600))  # noqa: PERF401
        assert "memory" not in str(refusal.value), "the queue is full before the server is"
        assert len(ids) == 10
        with here.working():
            assert all(client.result(job_id).ok for job_id in ids)
            assert client.decide(PNG, QUESTIONS).ok


def test_what_we_ship_has_the_memory_that_its_defaults_need() -> None:
    units = {"mb": MIB, "gb": 1024 * MIB}
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    command = services["redis"]["command"]
    for memory in (MAX_MEMORY, command[command.index("--maxmemory") + 1]):
        assert int(memory[:-2]) * units[memory[-2:]] >= needed_memory_bytes(MAX_WAITING_BYTES)
    assert Settings().max_waiting_bytes == MAX_WAITING_BYTES
    assert f"{needed_memory_bytes(MAX_WAITING_BYTES) // MIB} MiB" in Path(ROOT / "docs/operate.md").read_text()
