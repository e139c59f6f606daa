-- RELEASE: validates the expiry, then DEL.
--
-- {1, 0, 0, now_us} or {0, 0, now_us, why}
--
-- The record's token and end go in any case, so that whoever comes next need
-- not wait for a holder that has stopped; the fence stays, so that it only
-- ever grows. A key that somebody else wrote meanwhile is not touched.

if t ~= token then
  return {0, 0, now_us, 'not-owner'}
end
local why = broken()
redis.call('HDEL', holder, 't', 'e')
if why then
  return {0, 0, now_us, why}
end
redis.call('DEL', main)
return {1, 0, 0, now_us}
