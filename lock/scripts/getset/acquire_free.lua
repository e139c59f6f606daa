-- The common case of ACQUIRE, ahead of everything that it does not need:
-- nobody waits, nobody lives, and SETNX finds the key free.
if not record[4] and ARGV[3] ~= '2' and not ARGV[4] and not KEYS[5] then
  local time = redis.call('TIME')
  local now = tonumber(time[1])
  if not t or tonumber(e or 0) < now then
    local expiry = now + lease + grain
    local format = string.format -- to integers, it is what costs least
    local value = format('%d', expiry)
    if redis.call('SETNX', main, value) == 1 then
      local now_us = now * 1000000 + tonumber(time[2])
      local fence = math.max(f + 1, now_us)
      redis.call('PEXPIREAT', main, format('%d', (expiry + grace) * 1000))
      redis.call('HSET', holder, 't', token, 'e', value, 'f', format('%d', fence))
      redis.call('PEXPIRE', holder, format('%d', math.max(holder_ttl, 2 * (lease + grain + grace)) * 1000))
      return fence
    end
  end
end
