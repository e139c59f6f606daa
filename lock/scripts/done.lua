-- In front of RELEASE, for a claim that has handled its delivery well: that is so
-- whatever became of its lock.
--
-- ARGV[3]  window  milliseconds for which the delivery counts as handled; none: it may
--                  be tried again
--
-- A server that is out of memory cannot note it, but releases all the same.
if ARGV[3] then
  local noted = redis.pcall('SET', KEYS[5], '1', 'PX', ARGV[3])
  if noted.err and not string.find(noted.err, 'OOM', 1, true) then
    return noted
  end
end
