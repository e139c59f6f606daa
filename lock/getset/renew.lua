-- RENEW: a later end for a lock that is surely still the caller's.
--
-- {1, E, fence, now_us} or {0, 0, now_us, why}
--
-- A refusal changes nothing. Clearing the record here would let the next one
-- in before the holder has read that it lost; the holder stops, then releases.

if t ~= token then
  return {0, 0, now_us, 'not-owner'}
end
local why = broken()
if why then
  return {0, 0, now_us, why}
end

local expiry = math.max(tonumber(e), now + lease + 1)
write(expiry)
redis.call('HSET', holder, 'e', expiry)
keep_record(lease)
return {1, expiry, f, now_us}
