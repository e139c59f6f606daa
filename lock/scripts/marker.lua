-- In front of ACQUIRE and RENEW on a node of a quorum: a server that came up a
-- short while ago may have forgotten a lock to which it had given its vote, and
-- has no vote until that lock is surely over.
--
-- marker   the last key, which is taken off: "R M": the server's run R, and the microsecond M when the first
--          script of that run found no marker of it. No TTL. A server that comes back
--          empty, or is flushed, has none; one that comes back with older data, or a
--          replica that took over, has another run's.
--
-- {0, time left until it votes, 'restarted'}, or on to what follows
do
  local since_restart = 2  -- seconds, beyond the lease: the key counts whole ones

  local marker = table.remove(KEYS)
  local time = redis.call('TIME')
  local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') or ''
  local its_run, first_seen = string.match(redis.call('GET', marker) or '', '^(%w*) (%d+)$')
  first_seen = tonumber(first_seen or 0)
  if its_run ~= run or first_seen > now_us then -- later than now: the clock was wrong then
    first_seen = now_us
    redis.call('SET', marker, string.format('%s %d', run, now_us))
  end
  local votes = first_seen + (tonumber(ARGV[2]) + since_restart) * 1000000
  if now_us < votes then
    return {0, votes - now_us, 'restarted'}
  end
end
