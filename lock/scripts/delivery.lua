-- For claims that handle a delivery, as their token says: one that was handled well
-- already needs neither the lock nor a place. Whoever has the lock all the same, because
-- it was handed over, releases it.
--
-- {0, 0, 'done'}, or on to what follows
if KEYS[5] and redis.call('EXISTS', KEYS[5]) == 1 then
  return {0, 0, 'done'}
end

-- The reason of a refusal, more precisely if the one in the way handles the same
-- delivery.
local function explain(why, owner)
  local function delivery_of(name) return string.match(name, '^[^.]*%.[^.]*%.(%x+)') end
  if KEYS[5] and owner and owner ~= token and (why == 'held' or why == 'owner-live')
      and delivery_of(owner) == delivery_of(token) then
    return 'same-delivery'
  end
  return why
end

