"""The Lua scripts of the worker's side: take a job, begin it, give it back, end it, beat, tidy up, leave, bury.

Each may be sent again after a lost reply: a claim and a finish are recognised by their lease token, the others only
repeat themselves. They share the producer's prelude, so a result is written in one place.
"""

from __future__ import annotations

from producer.scripts import Script, script

# What `rq:job:<id>` may hold. Anything else (callbacks, dependencies, webhooks, meta, retries ...) refuses the job.
JOB_FIELDS = (
    "created_at enqueued_at started_at ended_at last_heartbeat origin status description timeout data worker_name "
    "payload_sha256 payload_bytes enqueued_us deadline_us started_us attempts lease cancel nonce ahead"
)
# A lease that claims to last longer than this was forged.
MAX_LEASE_S = 3600

# Args: token, worker, worker key, RQ's worker key, lease s, most payload bytes, most entries to look at, suspended key,
# 1 to claim ahead: beside the job that the worker has in hand. Such a claim does not count as an attempt before BEGIN,
# is of a job that was never started or claimed ahead before, and is left to any worker that is idle.
# Returns {notes, job}: `notes` are JSON log entries; `job` is {} or {id, attempts, queue ms, enqueued us, sha256};
# {"again"} when the entries ran out before the queue did.
CLAIM = script(
    """
local token, worker, worker_key, rq_worker_key, lease_s, max_bytes, budget, suspended, ahead = unpack(ARGV, 8)
lease_s, max_bytes = tonumber(lease_s), tonumber(max_bytes)
local is_ahead = ahead == '1'
local KNOWN = {}
for field in JOB_FIELDS:gmatch('%S+') do KNOWN[field] = true end
own(worker_key, 'hash')
own(rq_worker_key, 'hash')

local function claimed(job)
  local queue_ms = ms(job.started_us - job.enqueued_us)
  -- A job that was claimed ahead is on its first attempt.
  return {notes, {job.id, whole(math.max(job.attempts, 1)), queue_ms, whole(job.enqueued_us), job.sha256}}
end

-- The worker cannot know which payload to read; it reads this key, and PUT_BACK follows at once.
local function lend(id) redis.pcall('RENAME', PAYLOAD .. id, TAKEN .. token) end

-- Whether a queue entry's job was never in a worker's hands. One that was may have killed that worker, and must not
-- take the job in hand with it.
local function is_fresh(id)
  if not id or not well_formed(id) or redis.call('TYPE', JOB .. id).ok ~= 'hash' then return true end
  local f = redis.call('HMGET', JOB .. id, 'attempts', 'ahead')
  return f[1] == '0' and not f[2]
end

local function is_another_idle()
  local prefix = worker_key:sub(1, -#worker - 1)
  for _, name in ipairs(redis.call('ZREVRANGE', WORKERS, 0, 255)) do
    local key = prefix .. name
    if name ~= worker and own(key, 'hash') and redis.call('HGET', key, 'state') == 'ready' then return true end
  end
  return false
end

-- Why the record of a job is not one that a producer of ours wrote, or nil.
local function forgery(id)
  if redis.call('HLEN', JOB .. id) > 64 then return 'its record has too many fields' end
  local strange = {}
  for _, field in ipairs(redis.call('HKEYS', JOB .. id)) do
    if not KNOWN[field] and redis.call('HSTRLEN', JOB .. id, field) > 0 then strange[#strange + 1] = plain(field) end
  end
  table.sort(strange)
  if #strange > 0 then return 'forbidden fields in its record: ' .. table.concat(strange, ', ') end
  if redis.call('HSTRLEN', JOB .. id, 'data') ~= #CALL or redis.call('HGET', JOB .. id, 'data') ~= CALL then
    return 'its call is not worker.decide, the one that this queue runs'
  end
end

local function refuse(job, code, detail)
  job.forged = true
  end_with(job, 'invalid', code, detail)
end

-- The job of a queue entry if it may be started; everything else is ended or dropped here.
local function admit(id)
  if not well_formed(id) then return note('dropped', id, {why = 'malformed id'}) end
  redis.call('HDEL', WAITING, id)
  if own(RESULT .. id, 'hash') then return note('dropped', id, {why = 'it already has a result'}) end
  local kind = redis.call('TYPE', JOB .. id).ok
  if kind == 'none' and redis.call('DEL', PAYLOAD .. id) == 0 then
    return note('dropped', id, {why = 'no such job'})
  end
  local is_record = kind == 'hash'
  local why = is_record and forgery(id) or nil
  local job = is_record and read_job(id) or {id = id, status = '', sha256 = ''}
  if not why and job.status == 'started' and redis.call('ZSCORE', LEASES, id .. ':' .. job.lease) then
    return note('dropped', id, {why = 'it already runs'})
  end
  if not is_record then why = 'rq:job:' .. id .. ' is no record of a job' end
  if not why and job.status ~= 'queued' then why = 'its status is not queued' end
  if not why and not (job.enqueued_us and job.deadline_us and job.attempts) then
    why = 'its times or attempts are not numbers'
  end
  if why then return refuse(job, 'malformed_payload', why .. '; submit with producer.Client') end
  if job.attempts >= MAX_ATTEMPTS then
    return end_with(job, 'failed', 'worker_lost', 'started ' .. whole(job.attempts) .. ' times; not tried again')
  end
  if has_passed(job) then return expire(job) end
  if not own(PAYLOAD .. id, 'string') then
    return refuse(job, 'malformed_payload', 'there is no payload under its key; submit again')
  end
  local bytes = redis.call('STRLEN', PAYLOAD .. id)
  if bytes > max_bytes then
    return refuse(job, 'payload_too_large', string.format('the payload has %d bytes, at most %d are allowed; '
      .. 'send a smaller image', bytes, max_bytes))
  end
  return job
end

local function start(job)
  job.started_us, job.lease = NOW_US, token
  if not is_ahead then job.attempts = job.attempts + 1 end
  local member = job.id .. ':' .. token
  redis.call('ZADD', LEASES, NOW_S + lease_s, member)
  redis.call('ZADD', WIP, '+inf', member)
  redis.call('HSET', JOB .. job.id, 'status', 'started', 'attempts', whole(job.attempts), 'lease', token,
    'started_us', whole(NOW_US), 'started_at', iso(NOW_US), 'worker_name', worker)
  if is_ahead then return redis.call('HSET', JOB .. job.id, 'ahead', token) end
  redis.call('HSET', worker_key, 'state', 'busy', 'job', job.id)
  redis.call('HSET', rq_worker_key, 'state', 'busy', 'current_job', job.id)
end

-- Asked again after a lost reply: the job that this token already holds.
for _, member in ipairs(redis.call('ZRANGE', LEASES, 0, 1023)) do
  if member:sub(-#token - 1) == ':' .. token then
    local job = read_job(member:sub(1, -#token - 2))
    if job and job.lease == token and job.started_us and job.enqueued_us and job.attempts then return claimed(job) end
  end
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', NOW_S, 'LIMIT', 0, 16)) do recover(member) end
if redis.call('EXISTS', suspended) == 1 or is_ahead and is_another_idle() then return {notes, {}} end
for _ = 1, tonumber(budget) do
  if is_ahead and not is_fresh(redis.call('LINDEX', QUEUE, 0)) then return {notes, {}} end
  local id = redis.call('LPOP', QUEUE)
  if not id then
    redis.call('DEL', WAKE)
    return {notes, {}}
  end
  local job = admit(id)
  if job then
    start(job)
    lend(id)
    local left = redis.call('LLEN', QUEUE)
    if left == 0 then redis.call('DEL', WAKE) else redis.call('LTRIM', WAKE, -left, -1) end
    return claimed(job)
  end
end
return {notes, {'again'}}
""",
    JOB_FIELDS=JOB_FIELDS,
)

# Keys: leases, the key under which a claim's token lends the payload. Args: token, what payloads' keys begin with. Sent
# behind CLAIM and the reading, so without the prelude. If it is lost, so is the connection: the claim is asked for
# again, or its lease ends.
PUT_BACK = Script("""#!lua flags=allow-oom
if redis.call('EXISTS', KEYS[2]) == 0 then return 'nothing' end
for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, 1023)) do
  local id, token = member:match('^([A-Za-z0-9_-]+):([A-Za-z0-9_.-]+)$')
  if token == ARGV[1] then
    redis.call('RENAME', KEYS[2], ARGV[2] .. id)
    return 'back'
  end
end
return 'ended'
""")

# Args: id, token, worker, worker key, RQ's worker key. The turn of a prepared job: it goes to the device, and one that
# was claimed ahead counts as an attempt from here on, unless it was cancelled or its deadline has passed.
# Returns {notes, "go" | "ended" | "lost"}.
BEGIN = script("""
local id, token, worker, worker_key, rq_worker_key = unpack(ARGV, 8)
local member = id .. ':' .. token
local record_exists = redis.call('TYPE', JOB .. id).ok ~= 'none'
local job = read_job(id)
own(worker_key, 'hash')
own(rq_worker_key, 'hash')
local is_mine = redis.call('ZSCORE', LEASES, member) and job and job.lease == token

-- The worker has it no longer.
local function drop(verdict)
  if redis.call('HGET', worker_key, 'job') == id then
    redis.call('HSET', worker_key, 'state', 'ready')
    redis.call('HDEL', worker_key, 'job')
    redis.call('HSET', rq_worker_key, 'state', 'idle')
    redis.call('HDEL', rq_worker_key, 'current_job')
  end
  return {notes, verdict}
end

-- No trace of the job at all: the server lost its data, and this worker's answer is the only one there can be.
if not is_mine and (record_exists or own(RESULT .. id, 'hash')) then return drop('lost') end
if is_mine and (job.cancel or has_passed(job)) then
  redis.call('ZREM', LEASES, member)
  redis.call('ZREM', WIP, member)
  if job.cancel then end_with(job, 'cancelled', 'cancelled', 'cancelled before its turn') else expire(job) end
  return drop('ended')
end
if is_mine and redis.call('HGET', JOB .. id, 'ahead') == token then
  redis.call('HSET', JOB .. id, 'ahead', 'begun', 'attempts', whole((job.attempts or 0) + 1))
end
redis.call('HSET', worker_key, 'state', 'busy', 'job', id)
redis.call('HSET', rq_worker_key, 'state', 'busy', 'current_job', id)
return {notes, 'go'}
""")

# Args: id, token. A job that was claimed ahead goes back as if it had never been. Returns notes.
GIVE_BACK = script("""
local id, token = unpack(ARGV, 8)
local member = id .. ':' .. token
if not redis.call('ZSCORE', LEASES, member) then return notes end
local job = read_job(id)
if job and job.lease == token then redis.call('HDEL', JOB .. id, 'ahead') end
recover(member, 'its worker leaves')
return notes
""")

# Args: id, token, worker, worker key, RQ's worker key, state afterwards, status, body, model, prepare ms, vision ms,
# language ms, enqueued us, attempts, sha256, run ms. The last four are the worker's copies for a server that lost its
# data meanwhile. Returns {"done", status, queue ms, total ms, waiting jobs} or {"lost"}.
FINISH = script("""
local id, token, worker, worker_key, rq_worker_key, state, status, body, model, prepare_ms, vision_ms, language_ms,
  enqueued_us, attempts, sha256, run_ms = unpack(ARGV, 8)
local member = id .. ':' .. token
local record_exists = redis.call('TYPE', JOB .. id).ok ~= 'none'
local job = read_job(id)
local has_result = own(RESULT .. id, 'hash')
own(worker_key, 'hash')
own(rq_worker_key, 'hash')
local is_mine = redis.call('ZREM', LEASES, member) == 1
redis.call('ZREM', WIP, member)

if redis.call('HGET', worker_key, 'job') == id then
  redis.call('HSET', worker_key, 'state', state)
  redis.call('HDEL', worker_key, 'job')
  redis.call('HSET', rq_worker_key, 'state', 'idle')
  redis.call('HDEL', rq_worker_key, 'current_job')
end

if has_result then
  if not job or job.lease ~= token then return {'lost'} end
  -- Asked again after a lost reply.
  local written = redis.call('HMGET', RESULT .. id, 'status', 'queue_ms', 'total_ms')
  return {'done', written[1] or '', written[2] or '', written[3] or '', redis.call('LLEN', QUEUE)}
end
-- No trace of the job at all: the server lost its data, and this answer is the only one there can be.
local is_orphan = not record_exists and not is_mine
if not is_mine and not is_orphan then return {'lost'} end
if not job then
  job = {id = id, sha256 = sha256, enqueued_us = tonumber(enqueued_us), attempts = tonumber(attempts)}
  job.started_us = NOW_US - tonumber(run_ms) * 1000
  redis.call('HSET', JOB .. id, 'lease', token)
end
job.attempts = math.max(job.attempts or 0, 1) -- one that was refused ahead of its turn
if job.cancel then
  status, body = 'cancelled', refusal('cancelled', 'cancelled while running')
end
local queue_ms, total_ms = end_job(job, status, body, {worker = worker, model = model, prepare_ms = prepare_ms,
  vision_ms = vision_ms, language_ms = language_ms})
redis.call('HINCRBY', worker_key, 'jobs', 1)
redis.call('HINCRBY', worker_key, 'jobs_' .. status, 1)
redis.call('HINCRBY', rq_worker_key, status == 'failed' and 'failed_job_count' or 'successful_job_count', 1)
redis.call('HINCRBYFLOAT', rq_worker_key, 'total_working_time', tonumber(run_ms) / 1000)
local job_ms = tonumber(redis.call('HGET', RATE, 'job_ms') or '') or tonumber(run_ms)
redis.call('HSET', RATE, 'job_ms', string.format('%.3f', 0.9 * job_ms + 0.1 * tonumber(run_ms)))
redis.call('EXPIRE', RATE, RESULT_TTL_S)
return {'done', status, queue_ms, total_ms, redis.call('LLEN', QUEUE)}
""")

# Args: worker, worker key, RQ's worker key, RQ's workers, RQ's workers of the queue, lease s, ttl s, state ("" while
# serving: the server knows if it is busy), `<id>:<token>` of each job in hand, separated by blanks, number of own
# fields and values, these, RQ's fields and values. Returns the jobs in hand whose lease was lost, as they were given.
BEAT = script("""
local worker, worker_key, rq_worker_key, rq_workers, rq_queue_workers, lease_s, ttl_s, state, in_hand, count =
  unpack(ARGV, 8)
own(worker_key, 'hash')
own(rq_worker_key, 'hash')
own(rq_workers, 'set')
own(rq_queue_workers, 'set')
local ours, rqs = {}, {}
for i = 18, 17 + tonumber(count) do ours[#ours + 1] = ARGV[i] end
for i = 18 + tonumber(count), #ARGV do rqs[#rqs + 1] = ARGV[i] end

local lost = {}
for member in in_hand:gmatch('%S+') do
  if redis.call('ZSCORE', LEASES, member) then
    redis.call('ZADD', LEASES, 'XX', NOW_S + tonumber(lease_s), member)
  else
    lost[#lost + 1] = member
  end
end

local is_busy = redis.call('HEXISTS', worker_key, 'job') == 1
if state == '' then state = is_busy and 'busy' or 'ready' end
redis.call('HSET', worker_key, 'state', state, 'last_beat', iso(NOW_US), unpack(ours))
redis.call('EXPIRE', worker_key, ttl_s)
redis.call('ZADD', WORKERS, NOW_S, worker)
redis.call('ZREMRANGEBYSCORE', WORKERS, '-inf', NOW_S - 10 * tonumber(ttl_s))
local rq_state = ({ready = 'idle', draining = is_busy and 'busy' or 'idle'})[state] or state
redis.call('HSET', rq_worker_key, 'state', rq_state, 'last_heartbeat', iso(NOW_US), unpack(rqs))
redis.call('HSETNX', rq_worker_key, 'birth', iso(NOW_US))
redis.call('EXPIRE', rq_worker_key, ttl_s)
redis.call('SADD', rq_workers, rq_worker_key)
redis.call('SADD', rq_queue_workers, rq_worker_key)
return lost
""")

# Args: the most entries of each kind to look at, RQ's workers, RQ's workers of the queue. Drops what has ended or is
# malformed; a job that runs without a lease is taken back. Returns notes.
MAINTAIN = script(
    """
local budget, rq_workers, rq_queue_workers = tonumber(ARGV[8]), ARGV[9], ARGV[10]
for _, registry in ipairs({FINISHED, FAILED}) do redis.call('ZREMRANGEBYSCORE', registry, '-inf', NOW_S) end

for _, member in ipairs(redis.call('ZRANGEBYSCORE', LEASES, NOW_S + MAX_LEASE_S, '+inf', 'LIMIT', 0, budget)) do
  note('dropped', member, {why = 'a lease of more than ' .. MAX_LEASE_S .. ' s'})
  recover(member)
end
if redis.call('ZCARD', WIP) > 0 then
  for _, member in ipairs(redis.call('ZRANDMEMBER', WIP, budget)) do
    if not redis.call('ZSCORE', LEASES, member) then recover(member) end
  end
end

for _, id in ipairs(redis.call('LRANGE', QUEUE, 0, budget - 1)) do
  local job = well_formed(id) and read_job(id)
  if job and job.status == 'queued' and has_passed(job) and not own(RESULT .. id, 'hash') then
    unqueue(id)
    expire(job)
  end
end
if redis.call('HLEN', WAITING) > 0 then
  for _, id in ipairs(redis.call('HRANDFIELD', WAITING, budget)) do
    local job = well_formed(id) and read_job(id)
    if not job or job.status ~= 'queued' then redis.call('HDEL', WAITING, id) end
  end
end

for _, index in ipairs({rq_workers, rq_queue_workers}) do
  if own(index, 'set') then
    for _, key in ipairs(redis.call('SRANDMEMBER', index, budget)) do
      if redis.call('EXISTS', key) == 0 then redis.call('SREM', index, key) end
    end
  end
end
return notes
""",
    MAX_LEASE_S=MAX_LEASE_S,
)

# Args: worker, worker key, RQ's worker key, RQ's workers, RQ's workers of the queue, 1 to keep the worker's own key
# (it says why the worker failed) until it expires.
LEAVE = script("""
local worker, worker_key, rq_worker_key, rq_workers, rq_queue_workers, keep = unpack(ARGV, 8)
redis.call('DEL', rq_worker_key)
if keep ~= '1' then
  redis.call('DEL', worker_key)
  redis.call('ZREM', WORKERS, worker)
end
if own(rq_workers, 'set') then redis.call('SREM', rq_workers, rq_worker_key) end
if own(rq_queue_workers, 'set') then redis.call('SREM', rq_queue_workers, rq_worker_key) end
return {'left'}
""")

# Args: worker, worker key, RQ's worker key, RQ's workers, RQ's workers of the queue, why, ttl s. For who knows that a
# worker's process is gone: its jobs go back to the queue or end, the oldest at the front, and it goes off RQ's lists.
# Its own key says why it failed, unless it said so itself, until it expires. Returns {notes, 1 if it had been ready}.
BURY = script("""
local worker, worker_key, rq_worker_key, rq_workers, rq_queue_workers, why, ttl_s = unpack(ARGV, 8)
local jobs = {}
for _, member in ipairs(redis.call('ZRANGE', LEASES, 0, 1023)) do
  local id, token = member:match('^([A-Za-z0-9_-]+):([A-Za-z0-9_.-]+)$')
  local job = id and #id <= 64 and read_job(id)
  if job and job.worker == worker and job.lease == token then jobs[#jobs + 1] = job end
end
table.sort(jobs, function(a, b) return (a.enqueued_us or 0) > (b.enqueued_us or 0) end)
for _, job in ipairs(jobs) do recover(job.id .. ':' .. job.lease, 'worker ' .. plain(worker) .. ' is dead') end

local f = own(worker_key, 'hash') and redis.call('HMGET', worker_key, 'state', 'jobs') or {}
local state = f[1]
local was_ready = f[2] or state == 'ready' or state == 'busy' or state == 'draining'
if state ~= 'failed' then redis.call('HSET', worker_key, 'state', 'failed', 'error', why) end
redis.call('HDEL', worker_key, 'job', 'progress')
redis.call('EXPIRE', worker_key, ttl_s)
redis.call('ZADD', WORKERS, 'NX', NOW_S, worker)
redis.call('DEL', rq_worker_key)
if own(rq_workers, 'set') then redis.call('SREM', rq_workers, rq_worker_key) end
if own(rq_queue_workers, 'set') then redis.call('SREM', rq_queue_workers, rq_worker_key) end
return {notes, was_ready and 1 or 0}
""")
