-- INSPECT: what acquire.lua would say to somebody new. Writes nothing.
--
-- 1 when the lock is free,
-- {0, time left, why, 0, 0, length of the line} when somebody is in the way

local free_at, why = blocker()
local length = 0
if line_until >= now_us then
  length = redis.call('ZCARD', line)
end
if not why and length > 0 then
  -- At the latest then, if nobody in line lives any more.
  free_at, why = line_until / 1000000, 'held'
end
if why then
  return {0, left(free_at), explain(why, t), 0, 0, length}
end
return 1
