-- Every script starts with these lines: what the lock's holder record says.
--
-- KEYS[1]  main    the lock itself: the Unix second (integer) at which it stops
--                  being valid, as in the published SETNX locking pattern
-- KEYS[2]  holder  hash beside it: t token, e the second written to main, f fence;
--                  and as long as somebody waits, or did when last looked at:
--                  l the microsecond until which somebody in line may live,
--                  c the process that was handed the lock and has not confirmed
--                  it yet, p the token that handed it over
-- KEYS[3]  line    sorted set of those who wait: "token lease" by place
-- KEYS[4]  alive   hash: process -> the microsecond until which it counts as alive
-- ARGV[1]  token   of the caller: "process.random", fresh for every acquisition
-- ARGV[2]  lease   seconds
--
-- Numbers go to redis.call as numbers, which writes all of their digits. Lua's
-- own tostring would turn the 16 digits of a fence into 1.7530000001235e+15.

local grace = 2         -- seconds between the lock's end and the key's TTL
local holder_ttl = 600  -- seconds that the holder record outlives its last use

local main, holder, line, alive = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, lease = ARGV[1], tonumber(ARGV[2])

local record = redis.call('HMGET', holder, 't', 'e', 'f', 'l')
local t, e, f = record[1], record[2], tonumber(record[3] or 0)
