-- RELEASE: checks that it is still the caller's lock, then DEL; or hands it over
-- to the first in line.
--
-- 1; or {1, time left, fence, token of the successor}; or {0, 0, why}
--
-- The record's token and end go in any case, so that whoever comes next need
-- not wait for a holder that has stopped; the fence stays, so that it only
-- ever grows. A key that somebody else wrote meanwhile is not touched.

if line_until ~= 0 then
  -- It leaves the line. Also a holder may be in it: by a question that was late.
  redis.call('ZREM', line, token .. ' ' .. ARGV[2])
end
if t ~= token then
  if t and predecessor == token then
    -- Sent again because its reply got lost. Writes nothing.
    return {1, left(tonumber(e)), f, t}
  end
  return {0, 0, 'not-owner'}
end
local why = broken()
if why then
  redis.call('HDEL', holder, 't', 'e', 'c', 'p')
  return {0, 0, why}
end
local first = first_in_line()
if first then
  local expiry, fence, successor = hand_over(first, process_of(token))
  return {1, left(expiry), fence, successor}
end
redis.call('HDEL', holder, 't', 'e', 'c', 'p', 'l')
redis.call('DEL', main, line, alive)
return 1
