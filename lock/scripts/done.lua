-- In front of RELEASE, for a claim that has handled its delivery well: that is so
-- whatever became of its lock.
--
-- ARGV[3]  window  milliseconds for which the delivery counts as handled; none: it may
--                  be tried again
if ARGV[3] then
  redis.call('SET', KEYS[5], '1', 'PX', ARGV[3])
end
