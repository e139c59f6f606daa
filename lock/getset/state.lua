-- What the server's clock and the lock's key say now, and the checks.

local time = redis.call('TIME')
local now = tonumber(time[1])
local now_us = now * 1000000 + tonumber(time[2])

local line_until = tonumber(record[4] or 0)

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
  redis.call(cur and 'GETSET' or 'SETNX', main, expiry)
  redis.call('PEXPIREAT', main, (expiry + grace) * 1000)
end

local function keep_record(its_lease)
  local ttl = math.max(holder_ttl, 2 * (its_lease + 1 + grace))
  redis.call('PEXPIRE', holder, ttl * 1000)
end
