"""How a queue stands, in one round trip: what waits and for how long, what runs, who works, how quick a job is.

It only reads, so it also works on a replica and on a server that is out of memory. What is shown of it, and where, is
the matter of `python -m worker queue` and whoever else asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import redis

from producer.keys import Keys
from producer.scripts import Command

SERVING_STATES = ("ready", "busy")
# Waiting jobs and workers that are looked at; a queue's default bound is 256 jobs.
MOST_JOBS, MOST_WORKERS = 1024, 256

# Args: prefix of RQ's records, prefix of the workers' keys, the most jobs and workers to look at. A key that a stranger
# gave another type counts as empty. Returns {waiting, bytes, oldest's age in us or "", running, job ms or "", states}.
_FACTS = f"""#!lua flags=no-writes
local QUEUE, WAITING, LEASES, RATE, WORKERS = unpack(KEYS)
local JOB, WORKER = unpack(ARGV)
local time = redis.call('TIME')
local NOW_US = tonumber(time[1]) * 1000000 + tonumber(time[2])
local function is(key, kind) return redis.call('TYPE', key).ok == kind end
local function number(text) return text and #text <= 17 and tonumber(text:match('^%d+$') or '') or nil end

local bytes, oldest_us, states = 0, nil, {{}}
if is(WAITING, 'hash') then
  for _, size in ipairs(redis.call('HVALS', WAITING)) do bytes = bytes + (number(size) or 0) end
end
local queue = is(QUEUE, 'list')
for _, id in ipairs(queue and redis.call('LRANGE', QUEUE, 0, {MOST_JOBS - 1}) or {{}}) do
  local enqueued_us = is(JOB .. id, 'hash') and number(redis.call('HGET', JOB .. id, 'enqueued_us'))
  if enqueued_us and (not oldest_us or enqueued_us < oldest_us) then oldest_us = enqueued_us end
end
for _, name in ipairs(is(WORKERS, 'zset') and redis.call('ZREVRANGE', WORKERS, 0, {MOST_WORKERS - 1}) or {{}}) do
  if is(WORKER .. name, 'hash') then states[#states + 1] = redis.call('HGET', WORKER .. name, 'state') or 'unknown' end
end
return {{queue and redis.call('LLEN', QUEUE) or 0, bytes,
  oldest_us and string.format('%.0f', math.max(0, NOW_US - oldest_us)) or '',
  is(LEASES, 'zset') and redis.call('ZCARD', LEASES) or 0,
  is(RATE, 'hash') and redis.call('HGET', RATE, 'job_ms') or '', states}}
"""


@dataclass(frozen=True)
class QueueFacts:
    """A queue at one moment, by the server's clock."""

    waiting_jobs: int
    """Jobs that no worker has taken yet."""
    waiting_bytes: int
    """Their payloads' bytes; producers are refused at a bound of both."""
    oldest_waiting_s: float | None
    """How long ago the oldest of them was submitted; None if none waits."""
    running_jobs: int
    """Jobs in a worker's hand, under a lease."""
    workers: Mapping[str, int]
    """How many workers are in each state (`ready`, `busy`, `loading`, ...); a worker that is gone is in none."""
    job_ms: float | None
    """The smoothed time from taking a job to its end; None if none has ended within the results' lifetime."""

    @property
    def serving_workers(self) -> int:
        """Workers that take jobs: ready or busy."""
        return sum(self.workers.get(state, 0) for state in SERVING_STATES)

    @property
    def capacity_jobs_per_s(self) -> float | None:
        """What the serving workers can do at the measured `job_ms`; None if nothing was measured."""
        return None if not self.job_ms else self.serving_workers * 1000 / self.job_ms

    @property
    def drain_s(self) -> float | None:
        """How long the serving workers need for what waits; None without a worker or a measurement."""
        return None if not self.capacity_jobs_per_s else self.waiting_jobs / self.capacity_jobs_per_s

    def to_map(self) -> dict[str, object]:
        """All of it, for JSON."""
        return {
            **asdict(self),
            "workers": dict(self.workers),
            "serving_workers": self.serving_workers,
            "capacity_jobs_per_s": self.capacity_jobs_per_s,
            "drain_s": self.drain_s,
        }


def facts_command(keys: Keys) -> Command:
    """The command that asks for a queue's facts; `facts_of` reads its reply."""
    names = (keys.queue, keys.waiting, keys.leases, keys.rate, keys.workers)
    return ("EVAL", _FACTS, len(names), *names, keys.rq_job(""), keys.worker(""))


def facts_of(reply: list[Any]) -> QueueFacts:
    """The facts in the reply to `facts_command`, whether the client decodes replies or not."""
    waiting, size_bytes, oldest_us, running, job_ms, states = reply
    return QueueFacts(
        waiting_jobs=waiting,
        waiting_bytes=size_bytes,
        oldest_waiting_s=int(oldest_us) / 1e6 if oldest_us else None,
        running_jobs=running,
        workers=dict(sorted(Counter(_text(state) for state in states).items())),
        job_ms=_number(_text(job_ms)),
    )


def read_facts(client: redis.Redis, keys: Keys) -> QueueFacts:
    """Ask a server how a queue stands.

    Raises:
        redis.exceptions.RedisError: it cannot be reached or refuses this user.
    """
    return facts_of(client.execute_command(*facts_command(keys)))  # type: ignore[no-untyped-call]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _number(text: str) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
