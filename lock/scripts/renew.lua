-- RENEW: a later end for a lock that is surely still the caller's.
--
-- {1, time left, fence} or {0, 0, why}
--
-- A refusal changes nothing. Clearing the record here would let the next one
-- in before the holder has read that it lost; the holder stops, then releases.

if t ~= token then
  return {0, 0, 'not-owner'}
end
local why = broken()
if why then
  return {0, 0, why}
end

local expiry = math.max(tonumber(e or 0), now + lease + grain)
redis.call('HSET', holder, 'e', write(expiry, token))
keep_record(lease)
return {1, left(expiry), f}
