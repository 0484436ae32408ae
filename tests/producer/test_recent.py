"""The list of recent ends: written with each end, bounded, and nothing that a stranger puts there comes out of it."""

from __future__ import annotations

from producer.scripts import MAX_RECENT, Policy, call, script
from tests.servers import IMAGE, QUESTIONS, Place, asking

END = script("for n = 1, tonumber(ARGV[8]) do NOW_US = NOW_US + 1; "
             "end_with({id = ARGV[9] .. n, sha256 = ''}, 'failed', 'worker_lost', 'gone') end")  # fmt: skip


def test_every_kind_of_end_is_listed_whoever_wrote_it(any_place: Place) -> None:
    with any_place.client() as client:
        cancelled = client.submit(IMAGE, QUESTIONS)
        client.cancel(cancelled)
        expired = client.submit(IMAGE, QUESTIONS, deadline_s=0.001)
        client.result(expired)
        with any_place.working():
            ends = [client.decide(IMAGE, QUESTIONS), client.decide(b"no image", QUESTIONS)]
            ends += [client.decide(IMAGE, asking("raise"))]
        recent = client.recent()
    assert [end.status for end in recent] == ["failed", "invalid", "ok", "expired", "cancelled"]
    assert recent[:3] == ends[::-1] and [end.job_id for end in recent[3:]] == [expired, cancelled]


def test_the_list_is_bounded_and_goes_when_its_results_do(any_place: Place) -> None:
    keys = any_place.keys
    any_place.redis.execute_command(*call(END, keys, Policy(100), MAX_RECENT + 5, any_place.id("n")))
    assert any_place.redis.zcard(keys.recent) == MAX_RECENT and 0 < any_place.redis.ttl(keys.recent) <= 100
    with any_place.client() as client:
        assert [end.job_id for end in client.recent(2)] == [any_place.id(f"n{MAX_RECENT + n}") for n in (5, 4)]
        any_place.redis.delete(keys.result(any_place.id(f"n{MAX_RECENT + 5}")))
        assert [end.job_id for end in client.recent(2)] == [any_place.id(f"n{MAX_RECENT + n}") for n in (4, 3)]
    assert any_place.redis.zcard(keys.recent) == MAX_RECENT - 1, "what has expired is dropped when the list is read"


def test_what_strangers_write_is_not_listed_and_stops_nothing(any_place: Place) -> None:
    keys, far = any_place.keys, 9e15
    with any_place.client() as client, any_place.working():
        any_place.redis.set(keys.recent, "no list")
        assert client.recent() == []
        any_place.redis.set(keys.recent, "no list")
        end = client.decide(IMAGE, QUESTIONS)
        forged = any_place.id("forged")
        any_place.redis.zadd(
            keys.recent, {"../x": far, "a b": far, "\x1b[2J": far, forged: far, any_place.id("text"): far}
        )
        any_place.raw.zadd(keys.recent, {b"\xff": float("inf")})
        any_place.redis.hset(keys.result(forged), mapping={"status": "ok", "body": "{}"})
        any_place.redis.set(keys.result(any_place.id("text")), "no hash")
        zoneless = any_place.redis.hgetall(keys.result(end.job_id)) | {"finished_at": "2026-01-01T00:00:00"}
        any_place.redis.zadd(keys.recent, {any_place.id("zoneless"): far})
        any_place.redis.hset(keys.result(any_place.id("zoneless")), mapping=zoneless)
        assert client.recent() == [end]
        assert client.decide(IMAGE, QUESTIONS).ok
