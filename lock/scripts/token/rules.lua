-- The checks of a key that holds its holder's token, and how it is written.

local now = math.floor(now_us / 1000) / 1000

-- Who is in the way of an acquire: until when, and why; or nil. The key alone
-- decides. One that never ends is somebody else's for as long as he likes, or
-- forgotten: nobody can say.
local function blocker()
  if not cur then return end
  local ttl = redis.call('PTTL', main)
  if cur == '' or ttl < 0 then
    return 0, 'foreign-value'
  end
  -- Redis removes a key in the millisecond after its last.
  return now + (ttl + 1) / 1000, cur == t and 'held' or 'foreign-holder'
end

-- What keeps the holder from going on with its lock, or nil. Nobody else ever
-- writes its token: with that in it the key is the holder's, whatever became of
-- the TTL, which the next renewal brings back.
local function broken()
  if cur == t then return end
  if now >= tonumber(e or 0) then return 'expired' end
  return cur and 'main-changed' or 'main-gone'
end

-- Gives the lock to a token until an end, and returns what the record says of
-- that.
local function write(expiry, to)
  local ttl = string.format('%.0f', (expiry - now) * 1000)
  redis.call('SET', main, to, 'PX', ttl)
  return string.format('%.3f', expiry)
end
