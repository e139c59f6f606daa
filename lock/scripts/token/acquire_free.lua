-- The common case of ACQUIRE, ahead of everything that it does not need: nobody
-- waits, the last holder has released, and SET NX finds the key free.
if not t and not record[4] and ARGV[3] ~= '2' and not ARGV[4] and not KEYS[5] then
  local time = redis.call('TIME')
  local free = redis.call('SET', main, token, 'NX', 'PX', ARGV[2] .. '000')
  if free then
    local now_us = time[1] * 1000000 + tonumber(time[2])
    local fence = math.max(f + 1, now_us)
    local format = string.format
    local e = format('%d.%03d', time[1] + lease, time[2] / 1000)
    redis.call('HSET', holder, 't', token, 'e', e, 'f', format('%d', fence))
    redis.call('PEXPIRE', holder, format('%d', math.max(holder_ttl, 2 * lease) * 1000))
    return fence
  end
end
