-- Every script starts with these lines: what the server's clock, the lock's
-- key and its holder record say now.
--
-- KEYS[1]  main    the lock itself: the Unix second (integer) at which it stops
--                  being valid, as in the published SETNX locking pattern
-- KEYS[2]  holder  hash beside it: t token, e the second written to main, f fence
-- ARGV[1]  token   of the caller: fresh and random for every acquisition
--
-- Numbers are written with %.0f: Lua's tostring would turn the 16 digits of
-- a fence into 1.7530000001235e+15.

-- Redis before 5 replicates a script that reads the clock only when told so.
if redis.replicate_commands then
  redis.replicate_commands()
end

local main, holder, token = KEYS[1], KEYS[2], ARGV[1]

local time = redis.call('TIME')
local now = tonumber(time[1])
local now_us = now * 1000000 + tonumber(time[2])

local record = redis.call('HMGET', holder, 't', 'e', 'f')
local t, e, f = record[1], record[2], tonumber(record[3] or 0)

-- A key of another type is a foreign value like any other; every other error
-- (a missing permission, say) is an error.
local cur = redis.pcall('GET', main)
if type(cur) == 'table' then
  if not string.find(cur.err, 'WRONGTYPE', 1, true) then
    return cur
  end
  cur = 'wrong type'
end

-- Who is in the way of an acquire: the second until which, and why; or nil.
local function blocker()
  if cur then
    -- Some programs write a float; its integer part is what counts.
    local seconds = string.match(cur, '^(%d+)$') or string.match(cur, '^(%d+)%.%d+$')
    if not seconds or #seconds > 12 then
      return 0, 'foreign-value'
    end
    -- Free only strictly after that second, as its holder owns it strictly
    -- before: with "or equal" on both sides two hold it at once.
    if tonumber(seconds) >= now then
      return tonumber(seconds), 'held'
    end
  end
  -- The key was lost or overwritten, but the one who wrote it still lives.
  if t and tonumber(e or 0) >= now then
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
