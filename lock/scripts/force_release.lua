-- FORCE-RELEASE: frees the lock whoever holds it. A holder that still runs
-- learns of it by its next renewal. The fence stays, so that it only ever grows;
-- so does the line, whose first gets the lock by the next question.

redis.call('HDEL', holder, 't', 'e', 'c', 'p')
redis.call('DEL', main)
return 1
