"""A primary that Sentinels watch: clients and worker find it, and find the next one after a failover."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from redis.sentinel import MasterNotFoundError, Sentinel

from producer import Client
from producer.server_url import checked_url
from tests.servers import IMAGE, QUESTIONS, OwnServer, Place, free_port, server_binary, wait_until
from worker.__main__ import main

SERVICE = "shots"
PASSWORD = "p@ss/word"
QUOTED = "p%40ss%2Fword"


@dataclass
class Watch:
    """Two servers, one of them the primary, and a Sentinel."""

    servers: tuple[OwnServer, OwnServer]
    port: int

    @property
    def url(self) -> str:
        return f"redis+sentinel://:{QUOTED}@127.0.0.1:{free_port()},127.0.0.1:{self.port}/{SERVICE}"

    def primary_port(self) -> int | None:
        sentinel = Sentinel([("127.0.0.1", self.port)], socket_timeout=2.0)  # type: ignore[no-untyped-call]
        try:
            return int(sentinel.discover_master(SERVICE)[1])  # type: ignore[no-untyped-call]
        except MasterNotFoundError:
            return None


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    servers: list[OwnServer] = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        options = ["--requirepass", PASSWORD, "--masterauth", PASSWORD, "--repl-diskless-sync-delay", "0"]
        options += ["--replicaof", "127.0.0.1", str(servers[0].port)] if servers else []
        server = OwnServer(folder, server_binary(), options=tuple(options))
        server.start(wait=False)
        servers.append(server)
    primary = redis.Redis(port=servers[0].port, password=PASSWORD)
    # A Sentinel asks a primary for its replicas every ten seconds only.
    wait_until(lambda: in_step(primary) == 1, "the replica to be in step")
    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor {SERVICE} 127.0.0.1 {servers[0].port} 1\n"
        f"sentinel auth-pass {SERVICE} {PASSWORD}\nsentinel down-after-milliseconds {SERVICE} 500\n"
        f"sentinel failover-timeout {SERVICE} 5000\n"
    )
    process = subprocess.Popen([server_binary(), str(config), "--sentinel"], stdout=subprocess.DEVNULL)
    found = Watch((servers[0], servers[1]), port)
    try:
        wait_until(lambda: replicas(port) == 1, "the Sentinel to know the replica")
        yield found
    finally:
        process.kill()
        process.wait()
        for server in servers:
            if server.process is not None and server.process.poll() is None:
                server.kill()


def in_step(primary: redis.Redis) -> int:
    """How many replicas have all data of a primary."""
    try:
        info = primary.info("replication")
    except redis.RedisError:
        return 0
    return sum(1 for name, one in info.items() if name.startswith("slave") and one["state"] == "online")


def replicas(port: int) -> int:
    """How many replicas are known and in step."""
    try:
        with redis.Redis(port=port) as sentinel:
            known = sentinel.sentinel_slaves(SERVICE)
    except redis.RedisError:
        return 0
    return sum(one["flags"] == "slave" and one["master-link-status"] == "ok" for one in known)


def test_jobs_go_on_with_the_next_primary(watch: Watch, tmp_path: Path) -> None:
    place = Place(watch.url, tmp_path / "run")
    with place.process(name="w", ready=False) as process, place.client(reconnect_s=20.0) as client:
        assert client.decide(IMAGE, QUESTIONS).ok
        first, second = watch.servers
        assert watch.primary_port() == first.port
        first.kill()
        wait_until(lambda: watch.primary_port() == second.port, "the failover")
        assert client.decide(IMAGE, QUESTIONS, deadline_s=30).ok, "a job that only the next primary saw"
        assert process.poll() is None


def test_the_awaited_client_finds_it_too(watch: Watch, tmp_path: Path) -> None:
    place = Place(watch.url, tmp_path / "run")

    async def ask() -> bool:
        async with place.async_client() as client:
            return (await client.decide(IMAGE, QUESTIONS)).ok

    with place.process(name="w", ready=False):
        assert asyncio.run(ask())
        assert main(["status", "--redis-url", place.url, "--queue", place.queue]) in (0, 1)


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://:secret@host:26379",
        "redis+sentinel://:secret@host:port/shots",
        "redis+sentinel://:secret@host:26379,/shots",
        "redis+sentinel://:secret@host:26379/shots/one",
        "redis+sentinel://:secret@host:26379/shots?db=1",
    ],
)
def test_a_url_that_names_no_primary_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"redis\+sentinel://host:26379,host:26379/SERVICE") as refused:
        Client(url)
    assert "secret" not in str(refused.value)


def test_readable_urls_are_taken_as_they_are() -> None:
    for url in ("redis+sentinel://a,b:1,[::1]:2/shots/3", "rediss+sentinel://u:p%2F@a/shots"):
        assert checked_url(url) == url
