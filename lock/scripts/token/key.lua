-- The protocol "token": main holds its holder's token and ends with the lock, as
-- programs have it that write SET key token NX PX lease.

local grain = 0  -- seconds: a TTL counts milliseconds, and never ends early
local grace = 0  -- seconds between the lock's end and the key's TTL

