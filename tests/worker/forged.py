"""Forged jobs, as somebody who can write to Redis would push them: what each claims, and what must come of it."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgpack

from producer.scripts import CALL
from tests.servers import Place

REFUSED, DROPPED = "refused", "dropped"


class Forged(NamedTuple):
    """A forged job: its id, the RQ record, the payload (None for none), and its end."""

    name: str
    job_id: bytes
    record: dict[str, bytes | str | int]
    payload: bytes | None = b"\x80"
    end: str = REFUSED
    says: str = ""


class _Explosive:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (f"touch {self.canary}",)


def forged_jobs(place: Place, canary: Path) -> Iterator[Forged]:
    """Every kind of forgery. Anything that runs makes the canary file, imports the planted module, or calls a port."""
    harmful = pickle.dumps(_Explosive(canary))
    plain = {
        "created_at": "2026-12-01T00:00:00.000000Z", "status": "queued", "origin": place.queue, "data": CALL,
        "enqueued_us": 10**15, "deadline_us": 9 * 10**15, "attempts": 0, "payload_sha256": "0" * 64,
    }  # fmt: skip

    def job(name: str, says: str = "", **fields: bytes | str | int) -> Forged:
        return Forged(name, place.id(name).encode(), {**plain, **fields}, says=says)

    def rq_call(function: str, *args: object) -> bytes:
        packed = msgpack.packb((function, None, args, {}))
        assert isinstance(packed, bytes)
        return packed

    touch = f"touch {canary}"
    call_refused = "worker.decide"
    yield job("pickle-data", call_refused, data=harmful)
    yield job("pickle-data-zlib", call_refused, data=zlib.compress(harmful))
    yield job("pickle-call", call_refused, data=pickle.dumps(("os.system", None, (touch,), {})))
    yield job("msgpack-os-system", call_refused, data=rq_call("os.system", touch))
    yield job("msgpack-subprocess", call_refused, data=rq_call("subprocess.run", ["touch", str(canary)]))
    yield job("builtins-exec", call_refused, data=rq_call("builtins.exec", f"open({str(canary)!r}, 'w')"))
    yield job("planted-import", call_refused, data=rq_call("planted_module.run"))
    yield job("json-call", call_refused, data=json.dumps(["os.system", None, [touch], {}]))
    yield job("instance-call", call_refused, data=msgpack.packb(("system", {"x": 1}, (touch,), {})))
    yield job("zlib-bomb", call_refused, data=zlib.compress(bytes(64 * 2**20)))
    yield job("no-data", call_refused, data=b"")
    yield job("pickle-meta", "meta", meta=harmful)
    yield job("pickle-result", "result", result=harmful)
    yield job("exc-info-bomb", "exc_info", exc_info=zlib.compress(bytes(16 * 2**20)))
    for callback in ("success", "failure", "stopped"):
        yield job(f"{callback}-callback", f"{callback}_callback_name",
                  **{f"{callback}_callback_name": "planted_module.run"})  # fmt: skip
    hook = json.dumps([{"url": "http://127.0.0.1:9/", "method": "POST", "statuses": ["finished", "failed"]}])
    yield job("webhooks", "webhooks", webhooks=hook)
    yield job("dependency", "dependency_ids", dependency_ids=json.dumps(["x"]), dependency_id="x")
    yield job("repeats", "repeats_left", repeats_left=5, repeat_intervals="[0]")
    yield job("retries", "retries_left", retries_left=10**6)
    yield job("group", "group_id", group_id="x")
    yield job("many-fields", "too many", **{f"field{number}": "x" for number in range(100)})
    yield job("unprintable-field", "forbidden", **{"\x1b[31m\n": "x"})
    yield job("status-odd", "status", status="exploded")
    yield job("status-started", "status", status="started", lease="forged")
    yield job("times-odd", "numbers", enqueued_us="soon")
    yield job("times-nan", "numbers", deadline_us="nan")
    yield job("attempts-negative", "numbers", attempts=-5)
    yield job("attempts-huge", "numbers", attempts="9" * 30)
    yield job("created-odd", "cannot be read", created_at="x", timeout="abc", origin=b"\xff")._replace(payload=b"\xc1")
    yield job("garbage-payload", "")._replace(payload=b"\x00\xff garbage")
    yield job("empty-payload", "")._replace(payload=b"")
    yield job("big-payload", "bytes")._replace(payload=bytes(20 * 2**20))
    for name, payload in {
        "pickle-payload": harmful,
        "zlib-bomb-payload": zlib.compress(bytes(64 * 2**20)),
        "deep-payload": b"\x91" * 100_000,
        "extension-payload": msgpack.packb(msgpack.ExtType(42, harmful)),
        "many-values-payload": b"\xdd\xff\xff\xff\xff",
    }.items():
        yield job(name, "payload" if name != "extension-payload" else "")._replace(payload=payload)
    yield job("lease-forged", "cannot be read", ahead="x:y", lease="\x00", nonce="n" * 9999)._replace(payload=b"\xc1")
    yield job("no-payload", "no payload")._replace(payload=None)
    yield Forged("no-record", place.id("no-record").encode(), {}, says="no record")
    for number, bad_id in enumerate((b"bad id", b"\xff\xfe", b"", b"x" * 65, b"../../etc/passwd", b"a:b", b"a\nb")):
        yield Forged(f"bad-id-{number}", bad_id, {}, payload=None, end=DROPPED)
    yield Forged("bad-id-with-all", b"bad id " + place.queue.encode(), dict(plain), end=DROPPED)
    yield Forged("nothing-there", place.id("nothing-there").encode(), {}, payload=None, end=DROPPED)


def push(place: Place, forged: Forged) -> None:
    """Write a forged job as it is and queue it."""
    raw = place.raw
    job_id = forged.job_id.decode("latin-1")
    if forged.record:
        raw.hset(place.keys.rq_job(job_id), mapping=forged.record)  # type: ignore[arg-type]
    if forged.payload is not None:
        raw.set(place.keys.payload(job_id), forged.payload)
    raw.rpush(place.keys.queue, forged.job_id)
