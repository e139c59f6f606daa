-- The checks of a key that holds the second of its end, and how it is written.

local now = tonumber(time[1])

-- Who is in the way of an acquire: until when, and why; or nil. The key is free
-- only strictly after the second in it, as its holder owns it strictly before:
-- with "or equal" on both sides two hold it at once.
local function blocker()
  local owned = t and tonumber(e or 0) >= now
  if cur then
    -- Some programs write a float; its integer part is what counts.
    local seconds = string.match(cur, '^(%d+)$') or string.match(cur, '^(%d+)%.%d+$')
    if not seconds or #seconds > 12 then
      return 0, 'foreign-value'
    end
    if tonumber(seconds) >= now then
      return seconds + grain, owned and 'held' or 'foreign-holder'
    end
  end
  -- The key was lost or overwritten, but the one who wrote it still lives.
  if owned then
    return e + grain, 'owner-live'
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

-- Gives the lock to whoever the record names, until an end, and returns what the
-- record says of that. SETNX on a free key, GETSET on one that is there.
local function write(expiry)
  redis.call(cur and 'GETSET' or 'SETNX', main, expiry)
  redis.call('PEXPIREAT', main, (expiry + grace) * 1000)
  return expiry
end
