-- Tells a process that the lock was handed over to its token. Without the
-- permission to publish it finds out by asking.
local function tell(process, to)
  redis.pcall('PUBLISH', 'redis_lock:' .. process, to)
end
