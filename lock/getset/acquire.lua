-- ACQUIRE: SETNX on a free key, GETSET on an expired one.
--
-- ARGV[2]  lease      seconds
-- ARGV[3]  grace      seconds between the lock's end and the key's TTL
-- ARGV[4]  holderttl  seconds that the holder record outlives its last use
--
-- {1, E, fence, now_us} or {0, E of the one in the way, now_us, why}

local lease, grace, holderttl = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

-- Our own attempt, sent again because its reply got lost.
if t == token and not broken() then
  return {1, tonumber(e), f, now_us}
end

local until_second, why = blocker()
if why then
  return {0, until_second, now_us, why}
end

local expiry = now + lease + 1
local fence = math.max(f + 1, now_us)
local value = string.format('%.0f', expiry)
if cur then
  redis.call('GETSET', main, value)
else
  redis.call('SETNX', main, value)
end
redis.call('PEXPIREAT', main, string.format('%.0f', (expiry + grace) * 1000))
redis.call('HSET', holder, 't', token, 'e', value, 'f', string.format('%.0f', fence))
redis.call('PEXPIRE', holder, string.format('%.0f', holderttl * 1000))
return {1, expiry, fence, now_us}
