-- The protocol "getset": main holds the Unix second (integer) at which the lock
-- stops being valid, as in the published SETNX locking pattern.

local grain = 1  -- seconds: what main counts in
local grace = 2  -- seconds between the lock's end and the key's TTL

