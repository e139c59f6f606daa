-- The steps that concern the line, for the scripts that serve it.

local confirm = 2         -- seconds from now: the lease of a hand-over to another process
local presence = 3000000  -- microseconds that a process counts as alive after it asked

local unconfirmed, predecessor
if record[4] then
  record = redis.call('HMGET', holder, 'c', 'p')
  unconfirmed, predecessor = record[1], record[2]
end

local function process_of(name) return string.match(name, '^[^.]*') end

local function lives(entry)
  local process = process_of(entry)
  return process == process_of(token) or tonumber(redis.call('HGET', alive, process) or 0) >= now_us
end

-- The first in line, without the dead ones before it; or nil.
local function first_in_line()
  if line_until < now_us then return nil end
  while true do
    local entry = redis.call('ZRANGE', line, 0, 0)[1]
    if not entry or lives(entry) then return entry end
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
  local expiry = now + (near and its_lease + grain or confirm)
  local fence = math.max(f + 1, now_us)
  redis.call('ZREM', line, entry)
  local written = write(expiry, to)
  redis.call('HSET', holder, 't', to, 'e', written, 'f', fence, 'p', token)
  if near then
    redis.call('HDEL', holder, 'c')
  else
    redis.call('HSET', holder, 'c', its_process)
  end
  keep_record(its_lease)
  if not near then
    tell(its_process, to)
  end
  return expiry, fence, to
end
