-- ACQUIRE: the lock, or a place in line.
--
-- ARGV[3]  mode   none: go away when refused, 1 line up when refused, 2 line up in any case
-- ARGV[4]  place  of the caller in the line, as this script said before, if it has one
-- ARGV[5]  age    microseconds since the caller came, if it supersedes others
--
-- fence, for a lock that lasts for the whole lease from now on at least; or
-- {1, time left, fence}; or that with tokens as below; or
-- {0, time left of the one in the way, why, place, 1 if the place is new, length of the line,
--  tokens that are to hear of this question, by spaces: the one to which it handed the
--  lock, and those whose place it took}

local mode, place, age = ARGV[3], tonumber(ARGV[4] or 0), ARGV[5]
local mine = token .. ' ' .. ARGV[2]
local stands, added, told = false, 0, {}

-- Newest wins: of those who say so, one waits. What counts is when they came; n in the
-- holder record has the moment and the token of the last one that got a place, or the lock.
local newest, newest_token

local function rivals()
  local others = {}
  for _, entry in ipairs(redis.call('ZRANGE', line, 0, -1)) do
    if string.find(entry, '!', 1, true) and entry ~= mine then
      others[#others + 1] = entry
    end
  end
  return others
end

-- Takes the places of the others, for a token that came at place.
local function supersede()
  if not newest or newest_token == token or place <= newest then return end
  newest_token = token
  redis.call('HSET', holder, 'n', string.format('%.0f %s', place, token))
  for _, rival in ipairs(rivals()) do
    redis.call('ZREM', line, rival)
    told[#told + 1] = string.match(rival, '^%S+')
    tell(process_of(rival), told[#told])
  end
end

local function line_up()
  if stands then return end
  stands = true
  supersede()
  local wanted = place ~= 0 and place or now_us
  added = redis.call('ZADD', line, 'NX', wanted, mine)
  -- It may have a place that it was never told of: the reply got lost.
  place = added == 1 and wanted or tonumber(redis.call('ZSCORE', line, mine))
  line_until = math.max(line_until, now_us + presence)
  redis.call('HSET', alive, process_of(token), now_us + presence)
  redis.call('HSET', holder, 'l', line_until)
  redis.call('PEXPIRE', line, 2 * presence / 1000)
  redis.call('PEXPIRE', alive, 2 * presence / 1000)
  -- The record may be new, or its holder long gone; never earlier than it was.
  if redis.call('PTTL', holder) < holder_ttl * 500 then
    redis.call('PEXPIRE', holder, holder_ttl * 1000)
  end
end

if t == token and not broken() then
  local expiry = tonumber(e or 0)
  if unconfirmed or expiry <= now then
    -- It was handed over to us, or somebody has its key last longer. As RENEW does.
    expiry = math.max(expiry, now + lease + grain)
    redis.call('HSET', holder, 'e', write(expiry, token))
    redis.call('HDEL', holder, 'c')
    keep_record(lease)
  end
  -- Otherwise our own attempt, sent again because its reply got lost.
  return {1, left(expiry), f}
end

local free_at, why = blocker()
local owner, _ = t
if age then
  local moment, of = string.match(redis.call('HGET', holder, 'n') or '', '^(%d+) (%S+)$')
  newest, newest_token = tonumber(moment or 0), of
  if newest_token == token then
    place = newest -- of which it may not have been told: the reply got lost
  elseif explain(why, owner) == 'same-delivery' then
    -- What is sent again while it is handled is as old as that: it supersedes nobody.
    for _, rival in ipairs(rivals()) do
      if lives(rival) then
        return {0, 0, 'superseded'}
      end
    end
    place = place == 0 and newest or place
  elseif place == 0 then
    place = now_us - age
    if newest > now_us or newest == place then
      place = newest + 1 -- the clock was set back; or it is the very same moment
    end
  end
  if place < newest then
    return {0, 0, 'superseded'}
  end
end
if not why and mode ~= '2' then
  if t and unconfirmed then
    -- Handed over and never confirmed: that process is dead, or deaf.
    redis.call('HDEL', alive, unconfirmed)
  end
  if mode == '1' and line_until >= now_us then
    line_up() -- at its place: it may be the first
  end
  local first = first_in_line()
  if not first or first == mine then
    if line_until ~= 0 or place ~= 0 then
      redis.call('ZREM', line, mine)
      redis.call('HDEL', holder, 'c', 'p')
      if not first and line_until >= now_us then
        redis.call('HDEL', holder, 'l') -- the line is empty, and not only late
      end
    end
    supersede()
    local fence = math.max(f + 1, now_us)
    local expiry = now + lease + grain
    redis.call('HSET', holder, 't', token, 'e', write(expiry, token), 'f', fence)
    keep_record(lease)
    if #told > 0 then
      return {1, left(expiry), fence, table.concat(told, ' ')}
    end
    return fence
  end
  -- Nobody takes it before the first, who may not know yet that it is free.
  free_at, _, owner = hand_over(first)
  free_at, why = free_at + grain, 'held'
  told[#told + 1] = owner
end
if mode then
  line_up()
end
local length = 0
if line_until >= now_us then
  length = redis.call('ZCARD', line)
end
return {0, left(free_at or 0), explain(why or 'free', owner), place, added, length, table.concat(told, ' ')}
