-- Every script starts with what its protocol says of the lock's key
-- (<protocol>/key.lua), and these lines: what the lock's holder record says.
--
-- KEYS[1]  main    the lock itself
-- KEYS[2]  holder  hash beside it: t token, e the Unix second at which its lock
--                  ends, f fence;
--                  and as long as somebody waits, or did when last looked at:
--                  l the microsecond until which somebody in line may live,
--                  c the process that was handed the lock and has not confirmed
--                  it yet, p the token that handed it over;
--                  n "moment token" of the newest claim that supersedes others
-- KEYS[3]  line    sorted set of those who wait: "token lease" by place
-- KEYS[4]  alive   hash: process -> the microsecond until which it counts as alive
-- KEYS[5]  done    only for a token that names a delivery: exists while that counts
--                  as handled
-- ARGV[1]  token   of the caller: "process.random", fresh for every acquisition, then
--                  ".delivery" if it handles one, and "!" if it supersedes others
-- ARGV[2]  lease   seconds
--
-- In a script a moment is a Unix second, and a key's end that of the lock that it
-- says. What the scripts answer is how long it is until then, in microseconds.
--
-- Numbers go to redis.call as numbers, which writes all of their digits. Lua's
-- own tostring would turn the 16 digits of a fence into 1.7530000001235e+15.

local holder_ttl = 600  -- seconds that the holder record outlives its last use

local main, holder, line, alive = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, lease = ARGV[1], tonumber(ARGV[2])

local record = redis.call('HMGET', holder, 't', 'e', 'f', 'l')
local t, e, f = record[1], record[2], tonumber(record[3] or 0)
