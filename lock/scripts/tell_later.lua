-- In a cluster a script reaches the channels of its own slot only, if they are
-- not to be heard on every node: the caller tells, who learns of the hand-over
-- by the answer.
local function tell() end
