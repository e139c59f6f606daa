-- The common case of RELEASE, ahead of everything that it does not need: nobody
-- waits, and the key is the caller's. Compare and delete.
if t == token and not record[4] and redis.pcall('GET', main) == token then
  redis.call('HDEL', holder, 't', 'e')
  redis.call('DEL', main)
  return 1
end
