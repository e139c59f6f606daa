-- Every script starts with these lines: what the server's clock, the lock's
-- key and its holder record say now, and the steps that several scripts take.
--
-- KEYS[1]  main    the lock itself: the Unix second (integer) at which it stops
--                  being valid, as in the published SETNX locking pattern
-- KEYS[2]  holder  hash beside it: t token, e the second written to main, f fence;
--                  l the microsecond until which somebody in line may live;
--                  c the process that was handed the lock and has not confirmed
--                  it yet; p the token that handed it over
-- KEYS[3]  line    sorted set of those who wait: "token lease" by place
-- KEYS[4]  alive   hash: process -> the microsecond until which it counts as alive
-- ARGV[1]  token   of the caller: "process.random", fresh for every acquisition
-- ARGV[2]  lease   seconds
--
-- Numbers are written with %.0f: Lua's tostring would turn the 16 digits of
-- a fence into 1.7530000001235e+15.

-- Redis before 5 replicates a script that reads the clock only when told so.
if redis.replicate_commands then
  redis.replicate_commands()
end

local grace = 2              -- seconds between the lock's end and the key's TTL
local holder_ttl = 600       -- seconds that the holder record outlives its last use
local confirm = 1            -- seconds: the lease of a hand-over to another process
local presence = 3000000     -- microseconds that a process counts as alive after it asked

local main, holder, line, alive = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, lease = ARGV[1], tonumber(ARGV[2])

local time = redis.call('TIME')
local now = tonumber(time[1])
local now_us = now * 1000000 + tonumber(time[2])

local record = redis.call('HMGET', holder, 't', 'e', 'f', 'l', 'c', 'p')
local t, e, f = record[1], record[2], tonumber(record[3] or 0)
local line_until, unconfirmed, predecessor = tonumber(record[4] or 0), record[5], record[6]

-- A key of another type is a foreign value like any other; every other error
-- (a missing permission, say) is an error.
local cur = redis.pcall('GET', main)
if type(cur) == 'table' then
  if not string.find(cur.err, 'WRONGTYPE', 1, true) then
    return cur
  end
  cur = 'wrong type'
end

local function digits(n) return string.format('%.0f', n) end

local function process_of(name) return string.match(name, '^[^.]*') end

-- Who is in the way of an acquire: the second until which, and why; or nil.
local function blocker()
  local owned = t and tonumber(e or 0) >= now
  if cur then
    -- Some programs write a float; its integer part is what counts.
    local seconds = string.match(cur, '^(%d+)$') or string.match(cur, '^(%d+)%.%d+$')
    if not seconds or #seconds > 12 then
      return 0, 'foreign-value'
    end
    -- Free only strictly after that second, as its holder owns it strictly
    -- before: with "or equal" on both sides two hold it at once.
    if tonumber(seconds) >= now then
      return tonumber(seconds), owned and 'held' or 'foreign-holder'
    end
  end
  -- The key was lost or overwritten, but the one who wrote it still lives.
  if owned then
    return tonumber(e), 'owner-live'
  end
end

-- What keeps the holder from going on with its lock, or nil. The value is
-- compared with what the holder wrote, not only with the time: somebody else
-- may have taken an expired lock and been gone again. A key without a TTL was
-- written by a foreign GETSET, even when the seconds are the same by chance.
local function broken()
  if now >= tonumber(e or 0) then return 'expired' end
  if not cur then return 'main-gone' end
  if cur ~= e then return 'main-changed' end
  if redis.call('PTTL', main) <= 0 then return 'main-rewritten' end
end

-- The lock's end. SETNX on a free key, GETSET on one that is there.
local function write(expiry)
  local value = digits(expiry)
  redis.call(cur and 'GETSET' or 'SETNX', main, value)
  redis.call('PEXPIREAT', main, digits((expiry + grace) * 1000))
  return value
end

local function keep_record(its_lease)
  local ttl = math.max(holder_ttl, 2 * (its_lease + 1 + grace))
  redis.call('PEXPIRE', holder, digits(ttl * 1000))
end

-- The first in line, without the dead ones before it; or nil.
local function first_in_line()
  if line_until < now_us then return nil end
  while true do
    local entry = redis.call('ZRANGE', line, 0, 0)[1]
    if not entry then return nil end
    local process = process_of(entry)
    if process == process_of(token) or tonumber(redis.call('HGET', alive, process) or 0) >= now_us then
      return entry
    end
    redis.call('ZREM', line, entry)
  end
end

-- Gives the lock to an entry of the line, with a fence of its own. One of the
-- given process may start by the caller's answer. Any other is sent a message,
-- must ask, and has a short lease until then: it may be dead.
-- Returns the lock's end, the fence and the new token.
local function hand_over(entry, process)
  local to, its_lease = string.match(entry, '^(%S+) (%d+)$')
  local its_process = process_of(to)
  local near = its_process == process
  its_lease = tonumber(its_lease)
  local expiry = now + (near and its_lease or confirm) + 1
  local fence = math.max(f + 1, now_us)
  redis.call('ZREM', line, entry)
  redis.call('HSET', holder, 't', to, 'e', write(expiry), 'f', digits(fence), 'c', near and '' or its_process, 'p', token)
  keep_record(its_lease)
  if not near then
    -- Without the permission to publish it finds out by asking.
    redis.pcall('PUBLISH', 'redis_lock:' .. its_process, to)
  end
  return expiry, fence, to
end
