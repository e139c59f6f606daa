-- The common case of RELEASE, ahead of everything that it does not need:
-- nobody waits, and the key is as the caller left it. As its TTL ends grace
-- after the lock, it says whether the lock has expired, too.
if t == token and not record[4] and redis.pcall('GET', main) == e and redis.call('PTTL', main) > grace * 1000 then
  redis.call('HDEL', holder, 't', 'e')
  redis.call('DEL', main)
  return 1
end
