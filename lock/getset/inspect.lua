-- INSPECT: what acquire.lua would see. Writes nothing.
--
-- {1, 0, fence of the last holder, now_us} when the lock is free,
-- {0, E, now_us, why} when somebody is in the way

local until_second, why = blocker()
if why then
  return {0, until_second, now_us, why}
end
return {1, 0, f, now_us}
