-- What the server's clock and the lock's key say now.

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + tonumber(time[2])

local line_until = tonumber(record[4] or 0)

-- A key of another type is no lock, as an empty one; every other error (a missing
-- permission, say) is an error.
local cur = redis.pcall('GET', main)
if type(cur) == 'table' then
  if not string.find(cur.err, 'WRONGTYPE', 1, true) then
    return cur
  end
  cur = ''
end

-- How long it is until a moment, in microseconds: 30 years at most, as foreign
-- programs may write anything.
local function left(moment)
  return math.max(0, math.min(moment * 1000000 - now_us, 1e15))
end

local function keep_record(its_lease)
  local ttl = math.max(holder_ttl, 2 * (its_lease + grain + grace))
  redis.call('PEXPIRE', holder, ttl * 1000)
end

