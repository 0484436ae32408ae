"""The Lua scripts of the producer's side, and the shared snippet with which every script, the worker's too, ends a job.

A script is one step on the server: nothing is half done. Each is sent whole (`EVAL`) and starts with
`flags=allow-oom`, so that a server out of memory can still end and hand out jobs. The server's `TIME` is the only
clock. Payloads never pass through Lua, which would copy them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from producer.keys import Keys

# What `rq:job:<id>` names as its call: msgpack of ("worker.decide", nil, [], {}). One constant for every job; a worker
# compares it and never decodes it.
CALL = b"\x94\xadworker.decide\xc0\x90\x80"
# A payload outlives its deadline by this much, so that one taken in the last moment can still be read.
PAYLOAD_GRACE_MS = 60_000
# So many ends can be listed, the last ones.
MAX_RECENT = 1000

Command = tuple[str | bytes | int | float, ...]


class Script(NamedTuple):
    """One Lua script: its whole text."""

    text: str


@dataclass(frozen=True)
class Policy:
    """What every script must agree on.

    `result_ttl_s`: how long results are kept. `max_attempts`: how often a job may be started before it is given up.
    """

    result_ttl_s: int = 3600
    max_attempts: int = 3


def call(script: Script, keys: Keys, policy: Policy, *args: str | int | float) -> Command:
    """The command that runs a script on a queue."""
    names = [getattr(keys, name) for name in _KEYS]
    shared = (keys.payload(""), keys.result(""), keys.rq_job(""), keys.stream(""), keys.queue_name)
    return ("EVAL", script.text, len(names), *names, *shared, policy.result_ttl_s, policy.max_attempts, *args)


def seal(keys: Keys, job_id: str, payload: bytes) -> Command:
    """The command that gives a job that was submitted without its payload's digest that digest."""
    digest = hashlib.sha256(payload).hexdigest()
    return ("EVAL", SEAL.text, 2, keys.rq_job(job_id), keys.result(job_id), digest)


_KEYS = ("queue", "queues", "leases", "wip", "waiting", "wake", "finished", "failed", "rate", "workers", "recent")

_PRELUDE = """-- Keys (producer/keys.py says what each holds); the ids' own keys are made from their prefixes.
local QUEUE, QUEUES, LEASES, WIP, WAITING, WAKE, FINISHED, FAILED, RATE, WORKERS, RECENT = unpack(KEYS)
local PAYLOAD, RESULT, JOB, STREAM, QUEUE_NAME = unpack(ARGV, 1, 5)
local TAKEN = PAYLOAD .. 'taken:'
local RESULT_TTL_S, MAX_ATTEMPTS = tonumber(ARGV[6]), tonumber(ARGV[7])
local RQ_STATUS = {ok = 'finished', invalid = 'finished', failed = 'failed', expired = 'canceled',
  cancelled = 'canceled'}
local RQ_RESULT_TYPE = {ok = 1, invalid = 1, expired = 3, cancelled = 3, failed = 2}

local time = redis.call('TIME')
local NOW_US = tonumber(time[1]) * 1000000 + tonumber(time[2])
local NOW_S = NOW_US / 1000000
local notes = {}

local function whole(number) return string.format('%.0f', number) end
local function ms(us) return string.format('%.3f', us / 1000) end

-- ISO 8601, UTC. Days to a civil date as in H. Hinnant, "chrono-Compatible Low-Level Date Algorithms".
local function iso(us)
  local floor, seconds = math.floor, math.floor(us / 1000000)
  local z = floor(seconds / 86400) + 719468
  local era = floor(z / 146097)
  local doe = z - era * 146097
  local yoe = floor((doe - floor(doe / 1460) + floor(doe / 36524) - floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + floor(yoe / 4) - floor(yoe / 100))
  local mp = floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%06dZ', yoe + era * 400 + (month <= 2 and 1 or 0), month,
    doy - floor((153 * mp + 2) / 5) + 1, floor(seconds / 3600) % 24, floor(seconds / 60) % 60, seconds % 60,
    us - seconds * 1000000)
end

-- True if the key holds this type; a key of ours that a stranger gave another type is deleted.
local function own(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
  return found == kind
end

-- Before anything is written: an error half way through a script would leave half a step.
for key, kind in pairs({[QUEUE] = 'list', [QUEUES] = 'set', [LEASES] = 'zset', [WIP] = 'zset', [WAITING] = 'hash',
    [WAKE] = 'list', [FINISHED] = 'zset', [FAILED] = 'zset', [RATE] = 'hash', [WORKERS] = 'zset', [RECENT] = 'zset'}) do
  own(key, kind)
end

-- Text from a stranger, fit for a log line.
local function plain(text) return (text:sub(1, 64):gsub('[^%w_.: -]', '?')) end

local function note(event, id, more)
  local entry = more or {}
  entry.event, entry.id = event, plain(id)
  notes[#notes + 1] = cjson.encode(entry)
end

local function well_formed(id) return #id <= 64 and id:match('^[A-Za-z0-9_-]+$') ~= nil end

local function count(text) return text and #text <= 17 and text:match('^%d+$') and tonumber(text) or nil end

-- The bookkeeping of a job, or nil. Numbers that are none become nil.
local function read_job(id)
  if not own(JOB .. id, 'hash') then return nil end
  local f = redis.call('HMGET', JOB .. id, 'status', 'enqueued_us', 'deadline_us', 'attempts', 'lease', 'started_us',
    'payload_sha256', 'payload_bytes', 'cancel', 'worker_name')
  return {id = id, status = f[1] or '', enqueued_us = count(f[2]), deadline_us = count(f[3]),
    attempts = count(f[4]), lease = f[5] or '', started_us = count(f[6]), sha256 = f[7] or '',
    payload_bytes = count(f[8]) or 0, cancel = f[9], worker = f[10] or ''}
end

local function refusal(code, detail)
  return '{"code": ' .. cjson.encode(code) .. ', "detail": ' .. cjson.encode(detail) .. ', "errors": []}'
end

-- Ends a job: the one place where a result is written. The caller has seen that there is none yet.
-- `more`: worker, model and the engine's timings, where there are any.
local function end_job(job, status, body, more)
  local id, key = job.id, JOB .. job.id
  local enqueued_us = job.enqueued_us or NOW_US
  local queue_ms, total_ms = ms((job.started_us or NOW_US) - enqueued_us), ms(NOW_US - enqueued_us)
  local enqueued_at, ended_at = iso(enqueued_us), iso(NOW_US)
  own(RESULT .. id, 'hash')
  redis.call('HSET', RESULT .. id, 'status', status, 'body', body, 'model', more.model or '',
    'worker', more.worker or '', 'attempts', whole(job.attempts or 0), 'enqueued_at', enqueued_at,
    'finished_at', ended_at, 'queue_ms', queue_ms, 'prepare_ms', more.prepare_ms or '',
    'vision_ms', more.vision_ms or '', 'language_ms', more.language_ms or '', 'total_ms', total_ms,
    'payload_sha256', job.sha256)
  redis.call('EXPIRE', RESULT .. id, RESULT_TTL_S)
  redis.call('DEL', PAYLOAD .. id)
  redis.call('HDEL', WAITING, id)
  if job.forged then redis.call('DEL', key) end
  redis.call('HSET', key, 'status', RQ_STATUS[status], 'ended_at', ended_at, 'data', CALL, 'origin', QUEUE_NAME)
  redis.call('HSETNX', key, 'created_at', enqueued_at)
  redis.call('EXPIRE', key, RESULT_TTL_S)
  local registry = ({finished = FINISHED, failed = FAILED})[RQ_STATUS[status]]
  if registry then redis.call('ZADD', registry, math.floor(NOW_S) + RESULT_TTL_S, id) end
  own(STREAM .. id, 'stream')
  redis.call('XADD', STREAM .. id, '*', 'type', RQ_RESULT_TYPE[status], 'worker_name', more.worker or '')
  redis.call('EXPIRE', STREAM .. id, RESULT_TTL_S)
  redis.call('ZADD', RECENT, whole(NOW_US), id)
  redis.call('ZREMRANGEBYRANK', RECENT, 0, -MAX_RECENT - 1)
  redis.call('EXPIRE', RECENT, RESULT_TTL_S)
  return queue_ms, total_ms
end

-- The same for an end that no engine decided; it becomes a log line.
local function end_with(job, status, code, detail)
  local queue_ms, total_ms = end_job(job, status, refusal(code, detail), {worker = job.worker})
  note('ended', job.id, {status = status, code = code, queue_ms = queue_ms, total_ms = total_ms,
    attempts = job.attempts or 0, why = detail})
end

local function expire(job)
  end_with(job, 'expired', 'expired', 'the deadline passed ' .. ms(NOW_US - job.deadline_us)
    .. ' ms ago; take a new screenshot and submit again')
end

local function unqueue(id)
  redis.call('LREM', QUEUE, 0, id)
  redis.call('LREM', WAKE, 0, id)
end

local function has_passed(job) return job.deadline_us ~= nil and job.deadline_us <= NOW_US end

-- Takes a lease away from its worker: its job goes back to the front of the queue, or ends. `why`: not for its end.
local function recover(member, why)
  local id, token = member:match('^([A-Za-z0-9_-]+):([A-Za-z0-9_.-]+)$')
  redis.call('ZREM', LEASES, member)
  redis.call('ZREM', WIP, member)
  if not id or #id > 64 then return note('dropped', member, {why = 'malformed lease'}) end
  local job = read_job(id)
  if not job or job.status ~= 'started' or job.lease ~= token or own(RESULT .. id, 'hash') then return end
  if own(TAKEN .. token, 'string') then redis.call('RENAME', TAKEN .. token, PAYLOAD .. id) end
  if job.cancel then
    end_with(job, 'cancelled', 'cancelled', 'cancelled while running')
  elseif (job.attempts or 0) >= MAX_ATTEMPTS then
    end_with(job, 'failed', 'worker_lost', 'its worker was lost ' .. whole(job.attempts) .. ' times; not tried again')
  elseif has_passed(job) then
    expire(job)
  else
    redis.call('HSET', JOB .. id, 'status', 'queued')
    redis.call('HDEL', JOB .. id, 'lease', 'started_us', 'started_at')
    redis.call('LPUSH', QUEUE, id)
    redis.call('HSET', WAITING, id, whole(job.payload_bytes))
    redis.call('RPUSH', WAKE, id)
    why = why or 'the lease of worker ' .. plain(job.worker) .. ' ended'
    note('requeued', id, {why = why, attempts = job.attempts or 0})
  end
end
"""


def script(body: str, **constants: str | int) -> Script:
    """A script of its own body behind the shared prelude.

    The body's own arguments start at `unpack(ARGV, 8)`; `constants` become its locals.
    """
    lines = [
        f"local {name} = {_lua(value)}\n"
        for name, value in {"CALL": CALL, "MAX_RECENT": MAX_RECENT, **constants}.items()
    ]
    return Script("#!lua flags=allow-oom\n" + "".join(lines) + _PRELUDE + body)


def _lua(value: str | bytes | int) -> str:
    if isinstance(value, int):
        return str(value)
    data = value if isinstance(value, bytes) else value.encode()
    return "'" + "".join(f"\\{byte:03d}" for byte in data) + "'"


# Args: id, sha256, payload bytes, deadline ms, nonce, staged key, most waiting jobs, most waiting bytes.
# The sha256 for a fresh id may be empty, and SEAL brings it: such a submission is known again by its nonce alone.
# Returns {"queued" | "same", ms to the deadline}, {"duplicate"}, {"unsealed"} (the digest of the id's job is still to
# come: ask again) or {"full", retry after ms, jobs, bytes}.
SUBMIT = script(
    """
local id, sha256, bytes, deadline_ms, nonce, staged, max_jobs, max_bytes = unpack(ARGV, 8)
bytes, deadline_ms = tonumber(bytes), tonumber(deadline_ms)

local function known_sha256()
  if own(RESULT .. id, 'hash') then return redis.call('HGET', RESULT .. id, 'payload_sha256') or '' end
  local job = read_job(id)
  if job and (job.status == 'queued' or job.status == 'started') then return job.sha256 end
end

local function waiting_bytes()
  local sum = 0
  for _, size in ipairs(redis.call('HVALS', WAITING)) do sum = sum + (tonumber(size) or 0) end
  return sum
end

local function is_full()
  return redis.call('LLEN', QUEUE) + 1 > tonumber(max_jobs) or waiting_bytes() + bytes > tonumber(max_bytes)
end

-- Jobs that nobody will run any more make room first.
local function sweep()
  for _, waiting in ipairs(redis.call('LRANGE', QUEUE, 0, 1023)) do
    local job = well_formed(waiting) and read_job(waiting)
    if job and job.status == 'queued' and has_passed(job) and not own(RESULT .. waiting, 'hash') then
      unqueue(waiting)
      expire(job)
    end
  end
end

local function retry_after_ms()
  local workers = redis.call('ZCOUNT', WORKERS, NOW_S - 60, '+inf')
  local job_ms = tonumber(redis.call('HGET', RATE, 'job_ms') or '')
  if workers == 0 then return 5000 end
  return math.max(50, math.min(60000, math.ceil((job_ms or 1000) / workers)))
end

local known = known_sha256()
if known then
  redis.call('DEL', staged)
  local is_same = known == sha256
  if sha256 == '' then
    is_same = redis.call('TYPE', JOB .. id).ok == 'hash' and redis.call('HGET', JOB .. id, 'nonce') == nonce
  elseif known == '' then
    return {'unsealed'}
  end
  if not is_same then return {'duplicate'} end
  local job = read_job(id)
  return {'same', math.max(0, math.ceil(((job and job.deadline_us or NOW_US) - NOW_US) / 1000))}
end
if is_full() then sweep() end
if is_full() then
  redis.call('DEL', staged)
  return {'full', retry_after_ms(), redis.call('LLEN', QUEUE), waiting_bytes()}
end

local enqueued_at = iso(NOW_US)
redis.call('DEL', JOB .. id)
redis.call('HSET', JOB .. id, 'created_at', enqueued_at, 'enqueued_at', enqueued_at, 'origin', QUEUE_NAME,
  'status', 'queued', 'description', 'screenshot decision', 'data', CALL, 'timeout', math.ceil(deadline_ms / 1000),
  'payload_sha256', sha256, 'payload_bytes', whole(bytes), 'enqueued_us', whole(NOW_US),
  'deadline_us', whole(NOW_US + deadline_ms * 1000), 'attempts', 0, 'nonce', nonce)
redis.call('PEXPIRE', JOB .. id, deadline_ms + RESULT_TTL_S * 1000)
redis.call('RENAME', staged, PAYLOAD .. id)
redis.call('PEXPIRE', PAYLOAD .. id, deadline_ms + PAYLOAD_GRACE_MS)
redis.call('SADD', QUEUES, QUEUE)
redis.call('HSET', WAITING, id, whole(bytes))
redis.call('RPUSH', QUEUE, id)
redis.call('RPUSH', WAKE, id)
return {'queued', deadline_ms}
""",
    PAYLOAD_GRACE_MS=PAYLOAD_GRACE_MS,
)

# Keys: a job's record and its result. Args: sha256. Writes the payload's digest where it was left out. It makes no key.
# The worker sends it when the caller has its answer; the caller, for an end that perhaps no worker wrote.
SEAL = Script("""#!lua flags=allow-oom
for _, key in ipairs(KEYS) do
  if redis.call('TYPE', key).ok == 'hash' and redis.call('HGET', key, 'payload_sha256') == '' then
    redis.call('HSET', key, 'payload_sha256', ARGV[1])
  end
end
return 'sealed'
""")

# Args: id. What a waiting client asks for: ends the job if its deadline passed while it waited, takes it back from a
# worker whose lease has ended. Returns {"ended" | "unknown" | "waiting" | "running", ms until it is worth asking}.
SETTLE = script("""
local id = ARGV[8]
if own(RESULT .. id, 'hash') then return {'ended', 0} end
local job = read_job(id)
if job and job.status == 'started' then
  local member = id .. ':' .. job.lease
  local lease_end_s = tonumber(redis.call('ZSCORE', LEASES, member) or '')
  if lease_end_s and lease_end_s > NOW_S then return {'running', math.ceil((lease_end_s - NOW_S) * 1000)} end
  recover(member)
  if own(RESULT .. id, 'hash') then return {'ended', 0} end
  job = read_job(id)
end
if not job or job.status ~= 'queued' then return {'unknown', 0} end
if not has_passed(job) then return {'waiting', math.ceil(((job.deadline_us or NOW_US) - NOW_US) / 1000)} end
unqueue(id)
expire(job)
return {'ended', 0}
""")

# Args: id, nonce. With a nonce, only the job of that very submission is meant. Returns {"cancelled"} (it waited and has
# ended), {"cancelling"} (it runs and ends as cancelled when the work in hand is over), {"ended"} (it had a result
# already) or {"unknown"}.
CANCEL = script("""
local id, nonce = ARGV[8], ARGV[9]
if own(RESULT .. id, 'hash') then return {'ended'} end
local job = read_job(id)
if job and nonce ~= '' and redis.call('HGET', JOB .. id, 'nonce') ~= nonce then return {'unknown'} end
if job and job.status == 'started' then
  redis.call('HSET', JOB .. id, 'cancel', 1)
  return {'cancelling'}
end
if not job or job.status ~= 'queued' then return {'unknown'} end
unqueue(id)
end_with(job, 'cancelled', 'cancelled', 'cancelled while waiting')
return {'cancelled'}
""")

# Args: the most ids, a time in us. The ids of the jobs that ended last, after that time, newest first. Ids that are
# none or whose result is gone are dropped from the list. Returns the ids.
RECENT = script("""
local most, after_us = tonumber(ARGV[8]), ARGV[9]
local ids = {}
for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', RECENT, '+inf', '(' .. after_us, 'LIMIT', 0, MAX_RECENT)) do
  if #ids == most then break end
  if well_formed(id) and own(RESULT .. id, 'hash') then
    ids[#ids + 1] = id
  else
    redis.call('ZREM', RECENT, id)
  end
end
return ids
""")
