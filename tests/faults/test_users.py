"""Who may do what: the users of docs/redis-users.acl on a real server, TLS, passwords that stay secret."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import trustme

import producer.scripts
import worker.queue_facts
import worker.scripts
from producer import Client, ServerUnavailable
from producer.keys import Keys
from producer.settings import Settings as ProducerSettings
from tests.servers import IMAGE, QUESTIONS, ROOT, OwnServer, Place, asking, free_port, server_binary
from worker.dashboard import Reader
from worker.queue_facts import read_facts
from worker.settings import Settings

ACL_FILE = ROOT / "docs" / "redis-users.acl"
PASSWORD = {"producer": "CHANGE-producer", "worker": "CHANGE-worker", "admin": "CHANGE-admin"}


class DefaultPlace(Place):
    """The default queue and prefix, which the users are for; a server of its own keeps it apart."""

    @property
    def prefix(self) -> str:
        return "cua:"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """A server with exactly those users."""
    folder = tmp_path_factory.mktemp("guarded")
    shutil.copy(ACL_FILE, folder / "users.acl")
    server = OwnServer(folder, server_binary(), options=("--aclfile", str(folder / "users.acl")))
    server.start()
    yield server
    server.kill()


def place_of(server: OwnServer, who: str, tmp_path: Path) -> DefaultPlace:
    url = f"redis://cua-{who}:{PASSWORD[who]}@127.0.0.1:{server.port}/0"
    return DefaultPlace(url, tmp_path, queue="screenshots")


def test_the_two_users_can_do_the_whole_job(guarded: OwnServer, tmp_path: Path) -> None:
    """Submit, wait, cancel, expire and read as the producer; take, end, fail, be found and look as the worker."""
    asker, server, admin = (place_of(guarded, who, tmp_path) for who in ("producer", "worker", "admin"))
    with asker.client() as client:
        waiting = client.submit(IMAGE, QUESTIONS)
        assert client.submit(IMAGE, QUESTIONS, job_id=waiting) == waiting
        cancelled = client.submit(IMAGE, QUESTIONS)
        assert client.cancel(cancelled) and client.result(cancelled).status == "cancelled"
        expired = client.submit(IMAGE, QUESTIONS, deadline_s=0.01)
        assert client.result(expired).status == "expired"
        with server.process(name="w") as process:
            assert client.result(waiting).ok
            assert client.decide(IMAGE, asking("raise")).status == "failed"
            assert client.decide(b"no image", QUESTIONS).status == "invalid"
            slow, ahead = client.submit(IMAGE, asking("sleep 0.3")), client.submit(IMAGE, QUESTIONS)
            assert client.result(slow).ok and client.result(ahead).ok
            assert read_facts(server.raw, server.keys).serving_workers == 1
            assert {end.job_id for end in client.recent()} >= {waiting, cancelled, expired}
            assert len(Reader(server.settings).read().ends) == len(client.recent())
            for command in ("status", "queue"):
                done = subprocess.run(
                    [sys.executable, "-m", "worker", command],
                    cwd=ROOT, env={**os.environ, **server.environment}, capture_output=True, text=True, check=False,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
            process.terminate()
            output, _ = process.communicate(timeout=20)
        assert process.returncode == 0 and "WARNING" not in output, output
    refused = [entry for entry in admin.redis.acl_log() if entry["reason"] != "auth"]
    assert not refused, "nothing that the product itself does is refused"


def test_rqs_own_command_runs_as_the_worker(guarded: OwnServer, tmp_path: Path) -> None:
    place = place_of(guarded, "worker", tmp_path)
    asker, admin = place_of(guarded, "producer", tmp_path), place_of(guarded, "admin", tmp_path)
    admin.redis.acl_log_reset()
    rq = "import sys; from rq.cli import main; sys.exit(main())"
    command = ("-c", rq, "worker", "-w", "tests.worker.noop.NoopWorker", "-u", place.url, "-n", "rq", "screenshots")
    with place.process(*command, name="rq"), asker.client() as client:
        assert client.decide(IMAGE, QUESTIONS).worker == "rq"
    assert not admin.redis.acl_log()


def test_a_worker_that_may_not_rename_reads_in_a_round_trip_of_its_own(guarded: OwnServer, tmp_path: Path) -> None:
    server, asker, admin = (place_of(guarded, who, tmp_path) for who in ("worker", "producer", "admin"))
    admin.redis.execute_command("ACL", "SETUSER", "cua-worker", "-rename")  # type: ignore[no-untyped-call]
    try:
        with server.process(name="w") as process, asker.client() as client:
            assert client.decide(IMAGE, QUESTIONS).ok
            process.terminate()
            output, _ = process.communicate(timeout=20)
        assert process.returncode == 0 and "WARNING" not in output, output
    finally:
        admin.redis.execute_command("ACL", "SETUSER", "cua-worker", "+rename")  # type: ignore[no-untyped-call]
        admin.redis.acl_log_reset()


FORBIDDEN_TO_BOTH = (
    ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("SCAN", "0"), ("CONFIG", "GET", "*"), ("CONFIG", "SET", "dir", "/"),
    ("SHUTDOWN",), ("ACL", "LIST"), ("MONITOR",), ("CLIENT", "KILL", "TYPE", "normal"),
    ("REPLICAOF", "NO", "ONE"), ("MODULE", "LIST"), ("PUBLISH", "rq:pubsub:w", "x"), ("SCRIPT", "FLUSH"),
    ("FUNCTION", "LIST"), ("SET", "other:key", "x"), ("GET", "other:key"), ("HGETALL", "other:key"),
    ("HSET", "cua:else:x", "a", "b"), ("EVAL", "return redis.call('GET', 'other:key')", "0"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"), ("RPUSH", "rq:queue:other", "x"), ("DEL", "rq:job"),
)  # fmt: skip
FORBIDDEN = {
    "producer": (
        *FORBIDDEN_TO_BOTH, ("GET", "cua:job:x"), ("HGETALL", "cua:worker:w"), ("GET", "rq:suspended"), ("INFO",),
        ("HSET", "cua:worker:w", "state", "ready"), ("HSET", "rq:worker:w", "state", "idle"),
        ("BLPOP", "cua:wake:screenshots", "1"), ("LPOP", "rq:queue:screenshots"), ("SET", "rq:suspended", "1"),
    ),
    "worker": (
        *FORBIDDEN_TO_BOTH, ("SET", "cua:job:x", "y"), ("SET", "rq:suspended", "1"), ("XREAD", "STREAMS", "k", "0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("who", ["producer", "worker"])
def test_a_user_can_do_nothing_else(guarded: OwnServer, tmp_path: Path, who: str) -> None:
    place, admin = place_of(guarded, who, tmp_path), place_of(guarded, "admin", tmp_path)
    admin.redis.set("other:key", "theirs")
    for command in FORBIDDEN[who]:
        with pytest.raises(
            redis.ResponseError, match=r"(?i)no permissions|ACL failure|No permission|can't (run|access)"
        ):
            place.raw.execute_command(*command)
    assert admin.redis.get("other:key") == "theirs"


def test_nobody_else_gets_in(guarded: OwnServer, tmp_path: Path) -> None:
    for user, password in (("", ""), ("default", "x"), ("cua-producer", "wrong"), ("cua-worker", PASSWORD["producer"])):
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(f"redis://{user}:{password}@127.0.0.1:{guarded.port}/0").ping()


def test_a_user_without_the_rights_is_told_so(guarded: OwnServer, tmp_path: Path) -> None:
    """The wrong user, the wrong queue: an error that says so, at once and without the password."""
    asker = place_of(guarded, "producer", tmp_path)
    elsewhere = replace(place_of(guarded, "worker", tmp_path), queue="other")
    with (
        Client(asker.url, queue="other") as client,
        pytest.raises(ServerUnavailable, match=r"(?i)refuses this user.*permission") as error,
    ):
        client.submit(IMAGE, QUESTIONS)
    assert PASSWORD["producer"] not in str(error.value)
    for place in (asker, elsewhere):
        with place.process(ready=False) as process:
            output, _ = process.communicate(timeout=20)
        assert process.returncode == 2 and "refuses this user" in output, output
        assert "CHANGE" not in output


def test_a_wrong_password_is_told_and_never_shown(guarded: OwnServer, tmp_path: Path) -> None:
    url = f"redis://cua-producer:very-secret@127.0.0.1:{guarded.port}/0"
    with Client(url) as client, pytest.raises(ServerUnavailable, match="refuses this user") as error:
        client.submit(IMAGE, QUESTIONS)
    shown = [str(error.value), repr(error.value), repr(client), repr(error.value.__cause__)]
    environment = {**os.environ, "CUA_REDIS_URL": url, "CUA_RUNTIME_DIR": str(tmp_path)}
    for command in (
        ("tests.worker.noop", "run"), ("worker", "status"), ("worker", "queue"), ("producer", "result", "x"),
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode != 0 and done.stderr, command
        shown.append(done.stdout + done.stderr)
    assert not any("very-secret" in text for text in shown), shown


@pytest.mark.parametrize("password", ["sec/ret", "sec#ret", "sec?ret", "sec[ret"])
def test_a_url_that_cannot_be_read_is_not_repeated(tmp_path: Path, password: str) -> None:
    """A password that should have been percent-encoded is taken for a port, which an error would name."""
    url = f"redis://:{password}@127.0.0.1:6379/0"
    with pytest.raises(ValueError, match="percent-encoded") as error:
        Client(url)
    assert "sec" not in str(error.value) and error.value.__suppress_context__


def test_a_port_that_is_none_is_not_repeated(tmp_path: Path) -> None:
    environment = {**os.environ, "CUA_REDIS_URL": "redis://:sec/ret@127.0.0.1:1/0", "CUA_RUNTIME_DIR": str(tmp_path)}
    for command in (("worker", "run"), ("worker", "status"), ("worker", "queue"), ("producer", "result", "x")):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert done.returncode == 2 and "URL cannot be read" in output, output
        assert "'sec'" not in output and "sec/ret" not in output


def test_settings_never_show_a_password() -> None:
    url = "redis://u:very-secret@h/0"
    for settings in (Settings(redis_url=url), ProducerSettings(redis_url=url)):
        assert "secret" not in repr(settings) and "secret" not in str(settings)


def test_a_whole_job_under_tls(redis_url: str, tmp_path: Path) -> None:
    """`rediss://` with the authority's certificate named in the URL; without it, nobody trusts the server."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    port = free_port()
    binary = shutil.which("redis-server")
    assert binary is not None
    options = {"--tls-port": str(port), "--tls-cert-file": "server.pem", "--tls-key-file": "server.key",
               "--tls-ca-cert-file": "ca.pem", "--tls-auth-clients": "no"}  # fmt: skip
    server = OwnServer(tmp_path, binary, options=tuple(part for option in options.items() for part in option))
    server.start()
    try:
        place = Place(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'ca.pem'}", tmp_path)
        with place.process(), place.client() as client:
            assert client.decide(IMAGE, QUESTIONS).ok
        with (
            Client(f"rediss://127.0.0.1:{port}/0", reconnect_s=0.1) as client,
            pytest.raises(ServerUnavailable, match="certificate"),
        ):
            client.submit(IMAGE, QUESTIONS)
    finally:
        server.kill()


def test_the_users_have_what_the_scripts_call_and_the_default_keys() -> None:
    keys = Keys()
    lines = {line.split()[1]: line.split() for line in ACL_FILE.read_text().splitlines()}
    scripts = {"cua-producer": [producer.scripts], "cua-worker": [worker.scripts, worker.queue_facts]}
    for user, modules in scripts.items():
        texts = [getattr(value, "text", value) for module in modules for value in vars(module).values()]
        called = {name.lower() for text in texts for name in re.findall(r"redis\.p?call\('(\w+)'", str(text))}
        assert "hset" in called and {f"+{name}" for name in called} <= set(lines[user])
    for key in (keys.queue, keys.leases, keys.waiting, keys.wake, keys.rate, keys.workers, keys.wip, keys.finished,
                keys.failed, keys.queues):  # fmt: skip
        assert f"~{key}" in lines["cua-producer"] and f"~{key}" in lines["cua-worker"]
    assert lines["default"] == ["user", "default", "off"]
