package lock

import (
	"slices"
	"strings"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

func newModel(t testing.TB, p protocol, c modelCase, edit func(string) string, mutant clientMutant) *model {
	client := redistest.Start(t).Client
	return &model{
		protocol: p, modelCase: c, t: t, client: client, mutant: mutant,
		store: newRedisStore(client, loadScripts(p, tellNow, func(source string) string { return fakeTime(edit(source)) })),
		known: make(map[redisStep]redisStep), drained: make(map[world]int8),
		supersedes: slices.ContainsFunc(c.callers, modelCaller.supersedes),
	}
}

var modelCases = map[protocol][]modelCase{
	getsetProtocol: {
		{name: "slow2", callers: []modelCaller{{0, 1, true, ""}, {1, 1, true, ""}}, ticks: 6, atLeast: 70000, slow: 2},
		{name: "nowait", callers: []modelCaller{{0, 1, false, ""}, {1, 1, false, ""}, {1, 2, true, ""}}, ticks: 5, atLeast: 25000, slow: 1},
		{name: "fault2", callers: []modelCaller{{0, 1, true, ""}, {1, 2, true, ""}}, ticks: 4, atLeast: 50000, slow: 2, faults: 2},
		{name: "back", callers: []modelCaller{{0, 1, true, ""}, {1, 2, true, ""}}, ticks: 6, atLeast: 50000, slow: 1, meddles: 1, meddle: []int8{stepBack}},
		{name: "orderslow", callers: []modelCaller{{0, 1, true, ""}, {0, 1, true, ""}, {1, 1, true, ""}}, ticks: 3, atLeast: 50000, slow: 2, prompt: true, leaves: 1},
		{name: "pause", callers: []modelCaller{{0, 1, true, ""}, {1, 1, true, ""}, {0, 1, true, ""}}, ticks: 7, atLeast: 2500, early: true},
		{name: "crash", callers: []modelCaller{{0, 3, true, ""}, {1, 1, true, ""}, {0, 1, true, ""}}, ticks: 4, atLeast: 10000, crashes: 1},
		{name: "crash2", callers: []modelCaller{{0, 1, true, ""}, {1, 1, true, ""}, {1, 1, true, ""}, {0, 1, true, ""}}, ticks: 2, atLeast: 20000, crashes: 1, leaves: 0},
		{name: "order", callers: []modelCaller{{0, 1, true, ""}, {0, 1, true, ""}, {1, 1, true, ""}, {1, 2, true, ""}}, ticks: 2, atLeast: 6000, prompt: true},
		{name: "slow", callers: []modelCaller{{0, 1, true, ""}, {0, 2, true, ""}, {1, 1, true, ""}}, ticks: 3, atLeast: 40000, slow: 1},
		{name: "leave", callers: []modelCaller{{0, 1, true, ""}, {0, 1, true, ""}, {1, 1, true, ""}}, ticks: 2, atLeast: 25000, slow: 1, leaves: 1},
		{name: "meddle", callers: []modelCaller{{0, 1, true, ""}, {1, 2, true, ""}}, ticks: 3, atLeast: 55000, slow: 1, meddles: 2,
			meddle: []int8{loseMain, loseLine, loseAlive, writeMain, writeSame}},
		{name: "fault", callers: []modelCaller{{0, 1, true, ""}, {0, 2, true, ""}, {1, 1, true, ""}}, ticks: 2, atLeast: 30000, slow: 1, faults: 1},
		{name: "newest", callers: []modelCaller{{0, 1, true, ""}, {0, 1, true, "!"}, {0, 1, true, "!"}, {1, 1, true, "!"}}, ticks: 1, atLeast: 4000},
		{name: "newestslow", callers: []modelCaller{{0, 1, true, "!"}, {0, 1, true, "!"}, {1, 1, true, "!"}}, ticks: 2, atLeast: 35000, slow: 1},
		{name: "newestfault", callers: []modelCaller{{0, 1, true, "!"}, {0, 1, true, "!"}, {1, 1, true, "!"}}, ticks: 1, atLeast: 25000, slow: 1, faults: 1},
		{name: "newesthere", callers: []modelCaller{{0, 1, true, "!"}, {0, 1, true, "!"}, {0, 1, true, "!"}}, ticks: 1, atLeast: 20000, slow: 1, faults: 2},
		{name: "newestnowhere", callers: []modelCaller{{0, 1, true, "!"}, {0, 1, true, "!"}, {0, 1, true, "!"}}, ticks: 1, atLeast: 40000, early: true, slow: 1, faults: 1, meddles: 1, meddle: []int8{loseLine}},
		{name: "newestlost", callers: []modelCaller{{0, 1, true, "!"}, {0, 1, true, "!"}, {1, 1, true, "!"}}, ticks: 1, atLeast: 9000, leaves: 1, crashes: 1, meddles: 1, meddle: []int8{loseLine, loseAlive}},
		{name: "newestback", callers: []modelCaller{{0, 1, true, "!"}, {0, 1, true, "!"}, {1, 1, true, "!"}}, ticks: 2, atLeast: 25000, meddles: 1, meddle: []int8{stepBack}},
		{name: "delivery", callers: []modelCaller{{0, 1, true, ".a"}, {0, 1, true, ".a"}, {1, 1, true, ".a"}}, ticks: 2, atLeast: 12000, slow: 1, fails: 1},
		{name: "deliveryfault", callers: []modelCaller{{0, 1, true, ".a"}, {0, 1, true, ".a"}, {1, 1, true, ".a"}}, ticks: 1, atLeast: 5000, slow: 1, faults: 1},
		{name: "again", callers: []modelCaller{{0, 1, true, ".a!"}, {1, 1, true, ".b!"}, {1, 1, true, ".a!"}}, ticks: 2, atLeast: 25000, slow: 1},
		{name: "againlost", callers: []modelCaller{{0, 1, true, ".a!"}, {0, 1, true, ".a!"}, {1, 1, true, ".b!"}}, ticks: 1, atLeast: 1000, meddles: 1, meddle: []int8{loseAlive}},
	},
	// Most of the scripts is the same: fewer cases, and shorter ones.
	tokenProtocol: {
		{name: "slow2", callers: []modelCaller{{0, 1, true, ""}, {1, 1, true, ""}}, ticks: 5, atLeast: 45000, slow: 2},
		{name: "nowait", callers: []modelCaller{{0, 1, false, ""}, {1, 1, false, ""}, {1, 2, true, ""}}, ticks: 4, atLeast: 20000, slow: 1},
		{name: "fault2", callers: []modelCaller{{0, 1, true, ""}, {1, 2, true, ""}}, ticks: 3, atLeast: 35000, slow: 2, faults: 2},
		{name: "back", callers: []modelCaller{{0, 1, true, ""}, {1, 2, true, ""}}, ticks: 4, atLeast: 22000, slow: 1, meddles: 1, meddle: []int8{stepBack}},
		{name: "orderslow", callers: []modelCaller{{0, 1, true, ""}, {0, 1, true, ""}, {1, 1, true, ""}}, ticks: 2, atLeast: 40000, slow: 2, prompt: true, leaves: 1},
		{name: "crash", callers: []modelCaller{{0, 3, true, ""}, {1, 1, true, ""}, {0, 1, true, ""}}, ticks: 3, atLeast: 8000, crashes: 1},
		{name: "meddle", callers: []modelCaller{{0, 1, true, ""}, {1, 2, true, ""}}, ticks: 3, atLeast: 38000, slow: 1, meddles: 2,
			meddle: []int8{loseLine, loseAlive, writeMain, writeSame}},
		{name: "deliverylost", callers: []modelCaller{{0, 1, true, ".a"}, {1, 1, true, ".a"}, {1, 1, true, ".a"}}, ticks: 3, atLeast: 4000, early: true, crashes: 1},
		{name: "again", callers: []modelCaller{{0, 1, true, ".a!"}, {1, 1, true, ".b!"}, {1, 1, true, ".a!"}}, ticks: 1, atLeast: 12000, slow: 1, leaves: 1},
	},
}

func TestModel(t *testing.T) {
	for p, cases := range modelCases {
		for _, c := range cases {
			t.Run(string(p)+" "+c.name, func(t *testing.T) {
				t.Parallel()
				m := newModel(t, p, c, func(source string) string { return source }, noClientMutant)
				states, steps, broken := m.explore()
				t.Logf("%d states, %d transitions, %d asked of Redis, %d drained", states, steps, len(m.known), len(m.drained))
				if broken != "" {
					t.Fatal(broken)
				}
				if states < c.atLeast {
					t.Errorf("only %d states, want %d at least", states, c.atLeast)
				}
			})
		}
	}
}

// A model that finds nothing proves something only if it finds what is there.
func TestModelFindsMutants(t *testing.T) {
	for _, mutant := range []struct {
		of       protocol
		name     string
		in       string // the case that finds it
		old, new string // in a script
		client   clientMutant
	}{
		{getsetProtocol, "own retry of a broken lock", "meddle", "if t == token and not broken() then", "if t == token then", 0},
		{getsetProtocol, "free too early", "meddle", "if tonumber(seconds) >= now then", "if tonumber(seconds) > now + 1 then", 0},
		{getsetProtocol, "owner dead too early", "meddle", "tonumber(e or 0) >= now", "tonumber(e or 0) > now + 1", 0},
		{getsetProtocol, "owner-live ignored", "meddle", "    return e + grain, 'owner-live'", "", 0},
		{getsetProtocol, "hand-over keeps the end", "crash", "+ (near and its_lease + grain or confirm)", "+ (near and its_lease + grain or confirm); expiry = math.max(expiry, tonumber(e or 0))", 0},
		{getsetProtocol, "hand-over keeps the fence", "slow2", "local fence = math.max(f + 1, now_us)\n  redis.call('ZREM'", "local fence = f\n  redis.call('ZREM'", 0},
		{getsetProtocol, "fence by the clock", "back", "math.max(f + 1, now_us)", "now_us", 0},
		{getsetProtocol, "release unchecked", "meddle", "local why = broken()\nif why then\n  redis.call('HDEL'", "local why = nil\nif why then\n  redis.call('HDEL'", 0},
		{getsetProtocol, "release by anybody", "leave", "if t ~= token then\n  if t and", "if false then\n  if t and", 0},
		{getsetProtocol, "release keeps the record", "slow2", "redis.call('HDEL', holder, 't', 'e', 'c', 'p', 'l')", "redis.call('HDEL', holder, 'p', 'l')", 0},
		{getsetProtocol, "release alone keeps the record", "nowait", "  redis.call('HDEL', holder, 't', 'e')\n  redis.call('DEL', main)\n  return 1", "  redis.call('DEL', main)\n  return 1", 0},
		{getsetProtocol, "release alone unchecked", "meddle", "if t == token and not record[4] and redis.pcall('GET', main) == e and redis.call('PTTL', main) > grace * 1000 then", "if t == token and not record[4] then", 0},
		{getsetProtocol, "free in spite of a line", "orderslow", "if not record[4] and ARGV[3]", "if ARGV[3]", 0},
		{getsetProtocol, "free in spite of an owner", "meddle", "  if not t or tonumber(e or 0) < now then", "  if true then", 0},
		{getsetProtocol, "leaving keeps the place", "leave", "if line_until ~= 0 then\n  -- It leaves", "if false then\n  -- It leaves", 0},
		{getsetProtocol, "repeated release clears", "fault", "    return {1, left(tonumber(e)), f, t}", "    redis.call('HDEL', holder, 't', 'e'); redis.call('DEL', main)", 0},
		{getsetProtocol, "unconfirmed stays alive", "crash2", "    redis.call('HDEL', alive, unconfirmed)", "", 0},
		{getsetProtocol, "line ignored", "orderslow", "if not first or first == mine then", "if true then", 0},
		{getsetProtocol, "dead entries stay", "crash2", "    redis.call('ZREM', line, entry)\n  end", "    return entry\n  end", 0},
		{getsetProtocol, "renewal unchecked", "meddle", "local why = broken()\nif why then\n  return {0, 0, why}\nend\n\nlocal expiry", "local expiry", 0},
		{getsetProtocol, "renewal clears", "meddle", "if why then\n  return {0, 0, why}\nend\n\nlocal expiry", "if why then\n  redis.call('HDEL', holder, 't', 'e')\n  return {0, 0, why}\nend\n\nlocal expiry", 0},
		{getsetProtocol, "rewritten unseen", "meddle", "  if redis.call('PTTL', main) <= 0 then return 'main-rewritten' end\n", "", 0},
		{getsetProtocol, "no TTL", "slow2", "      redis.call('PEXPIREAT', main, format('%d', (expiry + grace) * 1000))\n", "", 0},
		{tokenProtocol, "SET without NX", "meddle", "'NX', ", "", 0},
		{tokenProtocol, "TTL shorter than the lock", "slow2", "ARGV[2] .. '000'", "ARGV[2] .. '00'", 0},
		{tokenProtocol, "hand-over for too short", "orderslow", "(expiry - now) * 1000", "(expiry - now) * 500", 0},
		{tokenProtocol, "free in spite of a line", "orderslow", "if not t and not record[4] and ARGV[3]", "if not t and ARGV[3]", 0},
		{tokenProtocol, "fence by the clock", "back", "math.max(f + 1, now_us)", "now_us", 0},
		{tokenProtocol, "foreign holder ignored", "meddle", "if not cur then return end", "if cur ~= t then return end", 0},
		{tokenProtocol, "holder ignored", "slow2", "if not cur then return end", "if cur == t then return end", 0},
		{tokenProtocol, "never broken", "meddle", "if cur == t then return end", "if true then return end", 0},
		{tokenProtocol, "release alone unchecked", "meddle", "and redis.pcall('GET', main) == token then", "then", 0},
		{tokenProtocol, "release alone keeps the record", "nowait", "  redis.call('HDEL', holder, 't', 'e')\n  redis.call('DEL', main)\n  return 1", "  redis.call('DEL', main)\n  return 1", 0},
		{tokenProtocol, "no end after a removed TTL", "meddle", "if unconfirmed or expiry <= now then", "if unconfirmed then", 0},
		{getsetProtocol, "newest not noted", "newest", "  redis.call('HSET', holder, 'n', string.format('%.0f %s', place, token))\n", "", 0},
		{getsetProtocol, "newest not noted with the lock", "newestslow", "    supersede()\n    local fence", "    local fence", 0},
		{getsetProtocol, "newest not looked at", "newest", "  if place < newest then", "  if false then", 0},
		{getsetProtocol, "newest forgets its moment", "newestnowhere", "if newest_token == token then\n    place = newest", "if false then\n    place = newest", 0},
		{getsetProtocol, "rivals stay", "newest", "    redis.call('ZREM', line, rival)\n", "", 0},
		{getsetProtocol, "newest by the clock", "newestback", "if newest > now_us or newest == place then", "if newest == place then", 0},
		{getsetProtocol, "age ignored", "newestfault", "now_us - age", "now_us", 0},
		{getsetProtocol, "sent again displaces", "again", "elseif explain(why, owner) == 'same-delivery' then", "elseif false then", 0},
		{getsetProtocol, "sent again always superseded", "again", "    place = place == 0 and newest or place", "    do return {0, 0, 'superseded'} end", 0},
		{getsetProtocol, "sent again superseded by the dead", "againlost", "if lives(rival) then", "if true then", 0},
		{getsetProtocol, "holder superseded", "newest", "if t == token and not broken() then", "if t == token and not broken() and not (ARGV[5] and not string.find(redis.call('HGET', holder, 'n') or '', token, 1, true)) then", 0},
		{getsetProtocol, "all are rivals", "newest", "if string.find(entry, '!', 1, true) and entry ~= mine then", "if entry ~= mine then", 0},
		{getsetProtocol, "handled not looked at", "delivery", "redis.call('EXISTS', KEYS[5]) == 1", "false", 0},
		{getsetProtocol, "handled by the fast path", "delivery", "not ARGV[4] and not KEYS[5] then", "not ARGV[4] then", 0},
		{tokenProtocol, "handled only by the owner", "deliverylost", "if ARGV[3] then\n  local noted", "if ARGV[3] and t == token then\n  local noted", 0},
		{getsetProtocol, "handled for ever", "delivery", "'1', 'PX', ARGV[3])", "'1')", 0},
		{getsetProtocol, "handled whatever the release says", "delivery", "if ARGV[3] then\n  local noted = redis.pcall('SET', KEYS[5], '1', 'PX', ARGV[3])", "if KEYS[5] then\n  local noted = redis.pcall('SET', KEYS[5], '1', 'PX', 3600000)", 0},
		{getsetProtocol, "delivery takes a gift", "delivery", "", "", deliveryTakesGift},
		{getsetProtocol, "keeps the lock of a delivery that was handled", "delivery", "", "", doneKeepsLock},
		{getsetProtocol, "oldest stays", "newest", "", "", oldestStays},
		{getsetProtocol, "newest without a place", "newestfault", "", "", placelessStays},
		{getsetProtocol, "superseded begins", "newestslow", "", "", supersededBegins},
		{getsetProtocol, "counts from the answer", "slow2", "", "", countsFromAnswer},
		{getsetProtocol, "starts on the message", "pause", "", "", startsOnMessage},
		{getsetProtocol, "renewal revives", "slow2", "", "", renewalRevives},
	} {
		t.Run(string(mutant.of)+" "+mutant.name, func(t *testing.T) {
			t.Parallel()
			for _, c := range modelCases[mutant.of] {
				if mutant.in != "" && mutant.in != c.name {
					continue
				}
				edited := mutant.old == ""
				m := newModel(t, mutant.of, c, func(source string) string {
					edited = edited || strings.Contains(source, mutant.old)
					if mutant.old == "" {
						return source
					}
					return strings.ReplaceAll(source, mutant.old, mutant.new)
				}, mutant.client)
				if !edited {
					t.Fatalf("%s: no script has what is to be changed", mutant.name)
				}
				states, _, broken := m.explore()
				broken, _, _ = strings.Cut(broken, "from {")
				if broken != "" {
					t.Logf("%s: found in %s after %d states: %s", mutant.name, c.name, states, broken)
					return
				}
			}
			t.Errorf("%s: not found", mutant.name)
		})
	}
}
