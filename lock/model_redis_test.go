package lock

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// The model's Redis: real, with the keys that a state says, and a clock that the test sets.

var modelEdits = []struct{ pattern, with string }{
	{`redis\.call\('TIME'\)`, `redis.call('HMGET', 'clock', 's', 'us')`},
	{`redis\.call\('PEXPIRE', (\w+), (.*)\)\n`, `redis.call('PEXPIREAT', $1, string.format('%d', fake_ms() + $2))` + "\n"},
	{`'PX', (.*)\)\n`, `'PXAT', string.format('%d', fake_ms() + ($1)))` + "\n"},
	{`redis\.call\('PTTL', (\w+)\)`, `(function() local at = pexpiretime($1); return at < 0 and at or at - fake_ms() end)()`},
	{`ARGV\[5\]`, `(ARGV[5] and redis.call('HGET', 'clock', 'age'))`},
	{`^`, pexpiretime + `local function fake_ms()
  local clock = redis.call('HMGET', 'clock', 's', 'us')
  return clock[1] * 1000 + math.floor(clock[2] / 1000)
end
`},
}

// pexpiretime is the command of Redis 7. In those before, it is computed from a clock that
// runs, also in scripts.
const pexpiretime = `local function pexpiretime(key)
  local at = redis.pcall('PEXPIRETIME', key)
  if type(at) == 'number' then return at end
  local function ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
  end
  while true do
    local now, ttl = ms(), redis.call('PTTL', key)
    if ttl < 0 then return ttl end
    if ms() == now then return now + ttl end
  end
end
`

var endsScript = redis.NewScript(pexpiretime + `
local ends = {}
for i, key in ipairs(KEYS) do ends[i] = pexpiretime(key) end
return ends`)

// fakeTime has a script go by the test's clock.
func fakeTime(source string) string {
	for _, edit := range modelEdits {
		source = regexp.MustCompile(edit.pattern).ReplaceAllString(source, edit.with)
	}
	return source
}

// redisDoes returns what the keys are after a request, and its answer.
func (m *model) redisDoes(w *world, request message) (modelKeys, answer) {
	// Which places and fences they are exactly does not matter to Redis either.
	keys, clock := w.keys, int8(newest)
	if w.clock > 0 {
		clock = w.clock
	}
	fence, future, places := keys.f, keys.n+1, []*int8{&clock, &request.place, &request.moment, &keys.n}
	keys.f = min(fence, 1)
	for i := range keys.line {
		places = append(places, &keys.line[i].place)
	}
	var before [maxCallers + 5]int8
	was := make([]int8, 0, len(places))
	for _, place := range places {
		was = append(was, *place)
	}
	renumber(places)
	for i, place := range places {
		before[*place] = was[i]
	}
	fenceOf := func(rank int8) int8 {
		if rank == 1 && fence > 0 {
			return fence
		}
		return rank
	}
	placeOf := func(rank int8) int8 {
		if rank < newest {
			return before[rank]
		}
		return future // made from that of a newest one that is later than the clock
	}

	question := redisStep{now: w.now, clock: clock, keys: keys, request: request}
	done, ok := m.known[question]
	if !ok {
		done = m.askRedis(question)
		m.known[question] = done
	}
	done.keys.f, done.answer.fence = fenceOf(done.keys.f), fenceOf(done.answer.fence)
	done.answer.place, done.keys.n = placeOf(done.answer.place), placeOf(done.keys.n)
	for i := range done.keys.line {
		done.keys.line[i].place = placeOf(done.keys.line[i].place)
	}
	return done.keys, done.answer
}

func (m *model) askRedis(question redisStep) redisStep {
	now, request := question.now, question.request
	m.restore(question)
	ctx := m.t.Context()
	claim := Claim{Token: m.token(request.who), Lease: time.Duration(m.callers[request.who-1].lease) * time.Second}
	var a answer
	var err error
	switch request.kind {
	case acquireRequest:
		claim.Wait, claim.LineUp = request.mode > 0, request.mode == 2
		if request.place > 0 {
			claim.Place = m.placeAt(question, request.place)
		}
		var grant Grant
		grant, err = m.store.Acquire(ctx, modelKey, claim)
		a = m.granted(now, grant)
	case renewRequest:
		var grant Grant
		grant, err = m.store.Renew(ctx, modelKey, claim)
		a = m.granted(now, grant)
	case releaseRequest:
		claim.Wait = request.mode == asWaiter
		if request.mode == handledWell {
			claim.Done = time.Hour
		}
		var next Successor
		next, err = m.store.Release(ctx, modelKey, claim)
		if next.Token != "" {
			a = m.granted(now, next.Grant)
			a.successor = m.caller(string(next.Token))
		}
	}
	a.yes = err == nil
	held, ok := errors.AsType[*HeldError](err)
	switch {
	case ok:
		a = answer{place: m.rank(question, held.Place)}
	case errors.Is(err, ErrDone):
		a = answer{no: done}
	case errors.Is(err, ErrSuperseded):
		a = answer{no: superseded}
	case err != nil && !errors.Is(err, ErrLost):
		m.t.Fatal(err)
	}
	return redisStep{keys: m.dump(question), answer: a}
}

const modelKey = "lock.foo"

func (m *model) token(who int8) Token {
	caller := m.callers[who-1]
	return Token(fmt.Sprintf("P%d.%d%s", caller.process, who, caller.mark))
}

func (m *model) caller(token string) int8 {
	_, who, _ := strings.Cut(token, ".")
	return int8(must(strconv.Atoi(who[:1])))
}

func (m *model) granted(now int8, grant Grant) answer {
	return answer{ttl: int8(grant.TTL / (time.Second / perSecond)), fence: m.fenceRank(now, grant.Fence)}
}

// Redis's clock stands still while a script runs. Fences of before are a little older than that.
func (m *model) micros(ticks int8) int64 { return second0*1e6 + int64(ticks)*1e6/perSecond }
func (m *model) ago(now int8) int64      { return m.micros(now) - 1000 }

// placeAt is the moment that a rank stands for.
func (m *model) placeAt(at redisStep, rank int8) int64 {
	return m.micros(at.now) + rankStep*int64(rank-at.clock)
}

// rank is newest for the moment after that of a newest one from the future.
func (m *model) rank(at redisStep, micros int64) int8 {
	switch rank := micros - m.placeAt(at, 0); {
	case micros == 0:
		return 0
	case rank > 0 && rank%rankStep == 0:
		return int8(rank / rankStep)
	}
	return newest
}

// fences are ahead of the clock where that may step back, as if it had done so before.
func (m *model) fences(now int8) int64 {
	if slices.Contains(m.meddle, stepBack) {
		return m.micros(now) + 1e6
	}
	return m.ago(now)
}

func (m *model) fenceRank(now int8, fence int64) int8 {
	switch rank := fence - m.fences(now); {
	case fence == 0:
		return 0
	case rank < 0:
		return 1
	case rank%rankStep == 0 && rank/rankStep < newest:
		return int8(rank / rankStep)
	}
	return newest
}

func (m *model) ticksOf(micros int64) int8 {
	return int8(max(longAgo, (micros-second0*1e6)*perSecond/1e6))
}

func (m *model) restore(at redisStep) {
	now, k := at.now, at.keys
	ctx := m.t.Context()
	millis := func(ticks int8) time.Time { return time.UnixMicro(m.micros(ticks)) }
	_ = must(m.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.Del(ctx, append(m.doneKeys(), modelKey, holderOf, lineOf, aliveOf)...)
		p.HSet(ctx, "clock", "s", m.micros(now)/1e6, "us", m.micros(now)%1e6,
			"age", m.micros(now)-m.placeAt(at, at.request.moment))
		if k.main != never {
			p.Set(ctx, modelKey, m.mainText(k.main), 0)
			if k.mainEnd != never {
				p.PExpireAt(ctx, modelKey, millis(k.mainEnd))
			}
		}
		if k.f > 0 {
			p.HSet(ctx, holderOf, "f", m.fences(now)+rankStep*int64(k.f))
		}
		if k.t > 0 {
			p.HSet(ctx, holderOf, "t", string(m.token(k.t)))
		}
		if k.p > 0 {
			p.HSet(ctx, holderOf, "p", string(m.token(k.p)))
		}
		if k.n > 0 {
			p.HSet(ctx, holderOf, "n", fmt.Sprintf("%d %s", m.placeAt(at, k.n), m.token(k.nOf)))
		}
		for i, key := range m.doneKeys() {
			if k.done[i] {
				p.Set(ctx, key, "1", 0)
				p.PExpireAt(ctx, key, time.Unix(second0+600, 0))
			}
		}
		if k.c > 0 {
			p.HSet(ctx, holderOf, "c", fmt.Sprintf("P%d", k.c-1))
		}
		if k.e != never {
			p.HSet(ctx, holderOf, "e", m.endText(k.e))
		}
		if k.l != never {
			p.HSet(ctx, holderOf, "l", m.micros(k.l))
		}
		p.PExpireAt(ctx, holderOf, time.Unix(second0+600, 0))
		for _, entry := range k.line {
			if entry.who > 0 {
				p.ZAdd(ctx, lineOf, redis.Z{Score: float64(m.placeAt(at, entry.place)), Member: m.entry(entry.who)})
			}
		}
		p.PExpireAt(ctx, lineOf, millis(k.lineEnd))
		for process, until := range k.alive {
			if until != never {
				p.HSet(ctx, aliveOf, fmt.Sprintf("P%d", process), m.micros(until))
			}
		}
		p.PExpireAt(ctx, aliveOf, millis(k.aliveEnd))
		return nil
	}))
}

const (
	holderOf = "{" + modelKey + "}:holder"
	lineOf   = "{" + modelKey + "}:line"
	aliveOf  = "{" + modelKey + "}:alive"
)

// doneKeys are those of the deliveries that the case has.
func (m *model) doneKeys() []string {
	var keys []string
	for _, name := range []string{"a", "b"}[:m.deliveries()] {
		keys = append(keys, "{"+modelKey+"}:done:"+name)
	}
	return keys
}

func (m *model) entry(who int8) string {
	return fmt.Sprintf("%s %d", m.token(who), m.callers[who-1].lease)
}

// dump reads the keys back. A key without the TTL that it should have does not decode.
func (m *model) dump(at redisStep) modelKeys {
	ctx := m.t.Context()
	var main *redis.StringCmd
	var holder, alive *redis.MapStringStringCmd
	var line *redis.ZSliceCmd
	var ends *redis.Cmd
	_, err := m.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		main = p.Get(ctx, modelKey)
		holder, alive = p.HGetAll(ctx, holderOf), p.HGetAll(ctx, aliveOf)
		line = p.ZRangeWithScores(ctx, lineOf, 0, -1)
		ends = endsScript.Eval(ctx, p, append([]string{modelKey, holderOf, lineOf, aliveOf}, m.doneKeys()...))
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		m.t.Fatal(err)
	}
	ms := must(ends.Int64Slice())
	end := func(i int) int8 {
		if ms[i] > 0 {
			return m.ticksOf(ms[i] * 1000)
		}
		return never
	}
	micros := func(text string, found bool) int8 {
		if !found {
			return never
		}
		return m.ticksOf(must(strconv.ParseInt(text, 10, 64)))
	}
	var k modelKeys
	k.main, k.mainEnd, k.e = never, end(0), never
	if main.Err() == nil {
		k.main = m.mainOf(main.Val())
	}
	record := holder.Val()
	if e, found := record["e"]; found {
		k.e = m.endOf(e)
	}
	l, found := record["l"]
	k.l = micros(l, found)
	if record["t"] != "" {
		k.t = m.caller(record["t"])
	}
	if record["p"] != "" {
		k.p = m.caller(record["p"])
	}
	if record["c"] != "" {
		k.c = int8(must(strconv.Atoi(record["c"][1:]))) + 1
	}
	if moment, token, found := strings.Cut(record["n"], " "); found {
		k.n, k.nOf = m.rank(at, must(strconv.ParseInt(moment, 10, 64))), m.caller(token)
	}
	for i := range m.deliveries() {
		const noTTL, noKey = -1, -2
		k.done[i] = ms[4+i] != noKey
		check(ms[4+i] != noTTL, "a delivery counts as handled for ever")
	}
	if record["f"] != "" {
		k.f = m.fenceRank(at.now, must(strconv.ParseInt(record["f"], 10, 64)))
	}
	k.holderHasNoEnd = len(record) > 0 && end(1) == never
	for i, entry := range line.Val() {
		token, _, _ := strings.Cut(entry.Member.(string), " ")
		k.line[i].who, k.line[i].place = m.caller(token), m.rank(at, int64(entry.Score))
	}
	k.lineEnd, k.aliveEnd = end(2), end(3)
	for process := range k.alive {
		until, found := alive.Val()[fmt.Sprintf("P%d", process)]
		k.alive[process] = micros(until, found)
	}
	return k
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
