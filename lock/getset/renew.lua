-- RENEW: a later end for a lock that is surely still the caller's.
--
-- ARGV[2]  lease      seconds
-- ARGV[3]  grace      seconds between the lock's end and the key's TTL
-- ARGV[4]  holderttl  seconds that the holder record outlives its last use
--
-- {1, E, fence, now_us} or {0, 0, now_us, why}
--
-- A refusal changes nothing. Clearing the record here would let the next one
-- in before the holder has read that it lost; the holder stops, then releases.

local lease, grace, holderttl = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

if t ~= token then
  return {0, 0, now_us, 'not-owner'}
end
local why = broken()
if why then
  return {0, 0, now_us, why}
end

local expiry = math.max(tonumber(e), now + lease + 1)
local value = string.format('%.0f', expiry)
redis.call('GETSET', main, value)
redis.call('PEXPIREAT', main, string.format('%.0f', (expiry + grace) * 1000))
redis.call('HSET', holder, 'e', value)
redis.call('PEXPIRE', holder, string.format('%.0f', holderttl * 1000))
return {1, expiry, f, now_us}
