package lock

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// These tests explore every order of events of a few callers in two processes that want one
// lock, up to the bounds of a modelCase: requests and answers that are slow, late or lost,
// pauses, crashes, others who meddle with the keys. What Redis does is not modelled: the real
// scripts run on a real server, once for each distinct content of the keys and request. Only time
// is not real: the scripts read a clock that the test sets.
//
// What a process does is told again here (as in acquire.go, line.go and handle.go), without margins,
// and with every timer free to fire whenever it likes. So a message on the channel, which only
// makes a waiter ask sooner, needs no step of its own: lost, late and repeated ones are the
// same as asking later, or once more.
//
// All moments are ticks since the beginning of the present second. Fences and places are ranks. So states that differ only in when they come
// about are one state, and the exploration ends. Where callers supersede one another, places are moments: see world.clock.
const (
	maxCallers = 4
	perSecond  = 2 // ticks
	longAgo    = -8 * perSecond
	never      = math.MaxInt8
	rankStep   = 10  // between two fences or places of neighbouring ranks
	newest     = 100 // rank of a place or a fence that a script has just made
	arrivalGap = 4   // of world.clock; a clock that was set back puts moments between
	tickGap    = arrivalGap * (maxCallers + 1)
	second0    = 4_000_000_000 // Redis's clock: so late that nothing expires by itself
)

type (
	// A modelCase says who wants the lock, and how much may go wrong.
	modelCase struct {
		name    string
		callers []modelCaller
		ticks   int8 // how long it lasts
		slow    int8 // requests that take a while, or their answers do
		faults  int8 // requests or answers that somebody gives up waiting for
		crashes int8 // of a process
		leaves  int8 // callers that lose patience
		meddles int8 // of somebody else with the keys
		meddle  []int8
		early   bool // all come within the first tick, and nobody renews
		prompt  bool // time passes only when everybody has done what is due; then order is strict
		fails   int8 // whose work does not go well, counted from 1
		atLeast int  // states
	}
	modelCaller struct {
		process int8
		lease   int8 // seconds
		waits   bool
		mark    string // what its token ends with: ".a", ".b" for a delivery, "!" if it supersedes
	}

	// world is a state. It has no padding and no pointers, so that it is a fast map key.
	world struct {
		now     int8
		keys    modelKeys
		callers [maxCallers]callerState
		late    [3]message // requests whose senders have given up, and which may arrive yet
		crashed [2]bool
		started int8 // fence of the last one that started
		marks   marks

		// clock tells moments within a tick: it advances with each arrival, and further with each tick.
		// 0: nothing is under way any more, so that only the order of moments counts; or nobody supersedes.
		clock int8

		ticks, slow, faults, crashes, leaves, meddles int8 // left
	}
	// modelKeys is what Redis holds. Callers are counted from 1, processes, too; 0 is nobody.
	modelKeys struct {
		main, mainEnd  int8 // never: no key; no TTL. See mainText.
		t, p, c, f     int8
		n, nOf         int8 // moment and token of the newest
		e, l           int8 // never: no such field
		line           [maxCallers]struct{ who, place int8 }
		lineEnd        int8
		alive          [2]int8 // never: no such field
		aliveEnd       int8
		done           [deliveries]bool
		holderHasNoEnd bool
	}
	callerState struct {
		stage           int8
		here            bool // its process takes it for the holder
		gift            bool // it has been given the lock, and has not noticed yet
		doubtful        bool // a request went unanswered
		due             bool // it is about to ask: it has just come, or what it was given came too late
		placed, asker   bool // asker: it leaves without having had the lock
		modest          bool // it handles what was handled when it asked, and supersedes nobody
		superseded      bool // by a newer one of its process, which it has not noticed yet
		fate            int8
		came            int8 // noted only of those that supersede
		place, order    int8 // order of arrival, in a prompt case
		deadline, fence int8 // of its lock, or its gift
		op              message
		t0              int8
		executed        bool // the answer is on its way
		answer          answer
	}
	// moment is when its sender came, as a script takes it that is executed now: the sender's age is that
	// of when it was sent. 0 if its place is known, or it does not supersede.
	message struct{ kind, who, mode, place, moment int8 }
	answer  struct {
		yes              bool
		no               int8 // for good: done or superseded
		ttl, fence       int8
		place, successor int8
	}
	action struct {
		do, who int8
		slow    bool // its request, or the answer, takes a while: other things come between
	}
)

// Stages of a caller.
const (
	absent  = iota
	waiting // or asking: its op is an acquire then
	running
	lost    // its deadline has passed, or the Store said so; it has not released yet
	leaving // its release is under way, or to be sent (again)
	gone
)

// Requests.
const (
	acquireRequest = iota + 1
	renewRequest
	releaseRequest
)

// What may happen next, and to whom.
const (
	tick   = iota
	arrive // and ask later
	ask
	resend  // what it asks: the connection broke
	execute // Redis executes a request
	receive // its sender gets the answer
	open    // a gift
	renew
	release // also again, after a release without an answer
	leave
	giveUp      // waiting for an answer
	executeLate // a request whose sender has given up waiting
	crash
	meddle
	actions
)

// What others do to the keys.
const (
	loseMain = iota
	loseLine
	loseAlive
	writeMain // see foreignWrite
	writeSame // see foreignKeeps
	stepBack  // of Redis's clock, by a second
)

var actionNames = [actions]string{
	"half a second passes", "arrives", "asks", "asks again over a new connection", "request executed", "gets its answer", "takes its gift", "renews", "releases", "leaves",
	"gives up waiting", "late request executed", "process crashes", "somebody meddles with the keys",
}

type model struct {
	protocol protocol
	modelCase
	store   Store
	client  *redis.Client
	t       testing.TB
	known   map[redisStep]redisStep // what Redis did
	drained map[world]int8          // see drain
	mutant  clientMutant

	supersedes bool // somebody does
}

type redisStep struct {
	now     int8
	clock   int8 // as places are
	keys    modelKeys
	request message
	answer  answer
}

// clientMutant is a mistake in what a process does.
type clientMutant int

const (
	noClientMutant clientMutant = iota
	countsFromAnswer
	startsOnMessage
	renewalRevives
	deliveryTakesGift
	doneKeepsLock
	oldestStays
	placelessStays
	supersededBegins
)

// A violation is what must not happen.
type violation string

func check(holds bool, format string, args ...any) {
	if !holds {
		panic(violation(fmt.Sprintf(format, args...)))
	}
}

// do carries one action out. It is false if that cannot happen now.
func (m *model) do(w *world, a action) bool {
	if !m.act(w, a) {
		return false
	}
	m.settle(w)
	return true
}

func (m *model) act(w *world, a action) bool {
	if a.do >= crash {
		return m.misfortune(w, a)
	}
	if a.do == executeLate {
		if int(a.who) >= len(w.late) || w.late[a.who].kind == 0 {
			return false
		}
		request := w.late[a.who]
		w.late[a.who] = message{}
		m.execute(w, request, true)
		return true
	}
	if a.do == tick {
		return a.who == 0 && w.ticks > 0 && (!m.prompt || m.allDone(w)) && m.tick(w)
	}
	if int(a.who) >= len(m.callers) || w.crashed[m.callers[a.who].process] {
		return false
	}
	c := &w.callers[a.who]
	idle := c.op.kind == 0
	if a.slow && a.do != execute && w.slow == 0 {
		return false
	}
	switch a.do {
	case arrive:
		if c.stage != absent || w.slow == 0 || !m.callers[a.who].supersedes() || m.early && w.ticks < m.ticks {
			return false
		}
		w.slow--
		m.arrive(w, a.who)
		c.stage, c.due = waiting, true
	case ask:
		if !idle || c.stage > waiting || c.gift || c.superseded || m.early && c.stage == absent && w.ticks < m.ticks {
			return false
		}
		if c.stage == absent {
			m.arrive(w, a.who)
		}
		c.stage, c.due = waiting, false
		mode := int8(0)
		if m.callers[a.who].waits {
			mode = 1
			if m.holderIn(w, a.who) {
				mode = 2
			}
		}
		request := message{kind: acquireRequest, who: a.who + 1, mode: mode, place: c.place}
		if request.place == 0 {
			request.moment = c.came
		}
		m.send(w, a, request)
	case resend:
		request := c.op
		if request.kind != acquireRequest || !m.callers[a.who].supersedes() || !m.abandon(w, c) {
			return false
		}
		if request.place == 0 {
			request.moment = c.came
		}
		m.send(w, a, request)
	case execute:
		if idle || c.executed {
			return false
		}
		if m.prompt && c.order == 0 {
			for _, other := range w.callers {
				c.order = max(c.order, other.order)
			}
			c.order++
		}
		c.answer = m.execute(w, c.op, false)
		c.executed, c.op.moment = true, 0
		if a.slow {
			return true
		}
		m.settle(w)
		m.receive(w, a.who)
	case receive:
		if idle || !c.executed {
			return false
		}
		m.receive(w, a.who)
	case open:
		if !c.gift && !c.superseded || !idle || c.stage != waiting || a.slow && !c.superseded {
			return false
		}
		if c.superseded {
			m.leave(w, a.who, superseded, a.slow)
			return true
		}
		c.gift = false
		m.checkGift(w, a.who)
		m.begin(w, a.who, c.deadline, c.fence)
	case renew:
		if !idle || m.early || c.stage != running || c.deadline >= w.now+m.callers[a.who].lease*perSecond {
			return false
		}
		m.send(w, a, message{kind: renewRequest, who: a.who + 1})
	case release:
		if c.stage != running && c.stage != lost && (c.stage != leaving || !idle) || !idle && !m.abandon(w, c) {
			return false
		}
		mode := int8(0)
		switch {
		case c.asker && m.callers[a.who].waits:
			mode = asWaiter
		case !c.asker && m.callers[a.who].delivery() > 0 && m.fails != a.who+1:
			mode = handledWell
		}
		c.stage, c.deadline, c.fence = leaving, 0, 0
		m.send(w, a, message{kind: releaseRequest, who: a.who + 1, mode: mode})
	case leave:
		if !idle || c.stage != waiting || w.leaves == 0 {
			return false
		}
		w.leaves--
		m.leave(w, a.who, quit, a.slow)
	case giveUp:
		if idle || w.faults == 0 || !m.abandon(w, c) {
			return false
		}
		switch c.stage {
		case waiting:
			m.unanswered(w, a.who)
		case leaving:
			c.here = false
		}
	}
	return true
}

// send sends a request, and unless that is slow, it is executed and answered by that.
func (m *model) send(w *world, a action, request message) bool {
	c := &w.callers[a.who]
	c.op, c.t0 = request, w.now
	if a.slow {
		w.slow--
		return true
	}
	return m.act(w, action{do: execute, who: a.who})
}

// abandon has a caller wait no longer for its answer. It is false if too much is late already.
func (m *model) abandon(w *world, c *callerState) bool {
	if w.faults == 0 {
		return false
	}
	w.faults--
	if !c.executed && !w.isLate(c.op) {
		return false
	}
	c.op, c.t0, c.executed, c.answer = message{}, 0, false, answer{}
	return true
}

// isLate has a request arrive later, or never. It is false if too many do already.
func (w *world) isLate(request message) bool {
	for i := range w.late {
		if w.late[i].kind == 0 {
			w.late[i] = request
			return true
		}
	}
	return false
}

// holderIn is true if a caller's process takes one of its callers for the holder.
func (m *model) holderIn(w *world, who int8) bool {
	for i := range m.callers {
		if w.callers[i].here && m.callers[i].process == m.callers[who].process {
			return true
		}
	}
	return false
}

func (m *model) execute(w *world, request message, late bool) answer {
	before := w.keys
	var a answer
	w.keys, a = m.redisDoes(w, request)
	k := &w.keys
	m.checkKey(w.now, &before, k)
	check(k.line[0].who == 0 || k.lineEnd != never, "the line without a TTL")
	check(!k.holderHasNoEnd, "the holder record without a TTL")
	m.checkMarks(w, &before, request, a, late)
	if m.mutant == startsOnMessage && k.t != before.t && k.c != 0 {
		w.callers[k.t-1].gift, w.callers[k.t-1].deadline = true, never
	}
	return a
}

// receive is what a caller makes of an answer.
func (m *model) receive(w *world, who int8) {
	c := &w.callers[who]
	request, a, t0 := c.op, c.answer, c.t0
	c.op, c.t0, c.executed, c.answer = message{}, 0, false, answer{}
	if m.mutant == countsFromAnswer {
		t0 = w.now
	}
	lease := min(m.callers[who].lease*perSecond, a.ttl)
	switch {
	case request.kind == acquireRequest && a.yes && c.superseded && m.mutant != supersededBegins:
		c.doubtful = true
	case request.kind == acquireRequest && a.no > 0:
		c.placed = c.placed || a.no == done // it may have been handed over
		if m.mutant == doneKeepsLock {
			c.placed, c.doubtful = false, false
		}
		m.leave(w, who, a.no, false)
	case request.kind == acquireRequest && a.yes:
		c.gift = false // it is the same lock
		m.begin(w, who, t0+lease, a.fence)
	case request.kind == acquireRequest:
		if !m.callers[who].waits {
			m.leave(w, who, quit, false)
			return
		}
		c.placed = true
		if a.place > 0 {
			c.place = a.place
		}
		if m.callers[who].supersedes() {
			m.supersede(w, m.callers[who].process)
		}
	case request.kind == renewRequest && c.stage != running: // too late
		if m.mutant == renewalRevives && a.yes {
			c.stage, c.deadline = running, t0+lease
		}
	case request.kind == renewRequest && a.yes:
		c.deadline = max(c.deadline, t0+lease)
	case request.kind == renewRequest:
		c.stage, c.deadline, c.here = lost, 0, false
		m.lost(w, who)
	case request.kind == releaseRequest:
		c.here = false
		if next := a.successor - 1; a.yes && next >= 0 && m.callers[next].process == m.callers[who].process {
			n := &w.callers[next]
			switch {
			case n.stage != waiting || n.gift || n.superseded:
			case m.callers[next].delivery() > 0 && m.mutant != deliveryTakesGift:
				n.due = true // whether it was handled meanwhile, Redis knows
			case !m.holderIn(w, who):
				n.gift, n.here, n.fence = true, true, a.fence
				n.deadline = t0 + min(m.callers[next].lease*perSecond, a.ttl)
			}
		}
		if !a.yes && c.asker && c.doubtful {
			c.doubtful = false // once more: its request may be slower than the release
			return
		}
		*c = c.in(gone)
	}
}

// begin has a caller run until a deadline, if that is still to come.
func (m *model) begin(w *world, who, deadline, fence int8) {
	c := &w.callers[who]
	if deadline == never { // by a message
		deadline, fence = w.now+perSecond, newest
	}
	if deadline <= w.now {
		c.here, c.deadline, c.fence, c.due = false, 0, 0, true
		m.unanswered(w, who)
		return
	}
	for i := range m.callers {
		o := &w.callers[i]
		check(o.stage != running || w.crashed[m.callers[i].process], "callers %d and %d run at once", i+1, who+1)
		both := m.callers[i].supersedes() && m.callers[who].supersedes()
		check(!m.prompt || o.stage != waiting || o.order == 0 || o.order >= c.order || both, "caller %d overtakes %d", who+1, i+1)
	}
	check(fence > w.started, "fence %d after %d", fence, w.started)
	check(!c.superseded, "caller %d begins, and is superseded", who+1)
	w.started = fence
	*c = callerState{stage: running, deadline: deadline, here: true, order: c.order, came: c.came}
	m.end(w, who, ran)
	m.checkForeigner(w)
}

// unanswered is what a caller makes of an attempt without an answer: it waits on only if it
// knows that there is something to wait for.
func (m *model) unanswered(w *world, who int8) {
	c := &w.callers[who]
	c.doubtful = true
	if !m.callers[who].waits || !c.placed && !m.holderIn(w, who) {
		m.leave(w, who, quit, false)
	}
}

// leave ends the waiting of a caller.
func (m *model) leave(w *world, who, fate int8, slow bool) {
	m.end(w, who, fate)
	c := &w.callers[who]
	if !c.placed && !c.doubtful {
		*c = c.in(gone)
		return
	}
	before := *c
	*c = c.in(leaving)
	c.doubtful, c.asker, c.here = before.doubtful, true, before.here && !before.doubtful
	m.act(w, action{do: release, who: who, slow: slow})
}

// in is what is left of a caller in one of the last stages.
func (c *callerState) in(stage int8) callerState {
	return callerState{stage: stage, order: c.order, fate: c.fate, came: c.came}
}

func (m *model) tick(w *world) bool {
	w.ticks--
	w.now++
	w.advance(tickGap)
	for i := range m.callers {
		if c := &w.callers[i]; c.stage == running && w.now >= c.deadline {
			c.stage, c.deadline, c.here = lost, 0, false
			m.lost(w, int8(i))
		}
	}
	if w.now == perSecond {
		w.now = 0
		m.shift(&w.keys, -1)
		for i := range w.callers {
			c := &w.callers[i]
			if c.op.kind != 0 {
				c.t0 = max(longAgo, c.t0-perSecond)
			}
			if c.stage == running || c.gift && c.deadline != never {
				c.deadline = max(longAgo, c.deadline-perSecond)
			}
		}
	}
	k := &w.keys
	if k.main != never && k.mainEnd <= w.now {
		k.main, k.mainEnd = never, never
	}
	if k.lineEnd <= w.now {
		k.line, k.lineEnd = [maxCallers]struct{ who, place int8 }{}, never
	}
	if k.aliveEnd <= w.now {
		k.alive, k.aliveEnd = [2]int8{never, never}, never
	}
	return true
}

// allDone is true if nobody has anything to do before time passes.
func (m *model) allDone(w *world) bool {
	for i, caller := range m.callers {
		c := &w.callers[i]
		due := c.op.kind != 0 || c.gift || c.stage == lost || c.stage == leaving ||
			c.due || c.stage == waiting && (w.keys.t == int8(i)+1 || w.keys.alive[caller.process] != w.now+3*perSecond)
		if due && !w.crashed[caller.process] {
			return false
		}
	}
	return true
}

// misfortune is an action of nobody who takes part.
func (m *model) misfortune(w *world, a action) bool {
	k := &w.keys
	switch {
	case a.do == crash:
		if w.crashes == 0 || a.who > 1 || w.crashed[a.who] {
			return false
		}
		w.crashes--
		w.crashed[a.who] = true
		for i := range m.callers {
			if m.callers[i].process != a.who {
				continue
			}
			c := &w.callers[i]
			if c.op.kind != 0 && !c.executed {
				w.isLate(c.op)
			}
			m.end(w, int8(i), quit)
			*c = c.in(gone)
		}
		return true
	case w.meddles == 0 || int(a.who) >= len(m.meddle):
		return false
	}
	w.meddles--
	before := *k
	switch m.meddle[a.who] {
	case loseMain:
		k.main, k.mainEnd = never, never
	case loseLine:
		k.line, k.lineEnd = [maxCallers]struct{ who, place int8 }{}, never
	case loseAlive:
		k.alive, k.aliveEnd = [2]int8{never, never}, never
	case writeMain:
		m.foreignWrite(w)
	case writeSame:
		m.foreignKeeps(k)
	case stepBack:
		m.shift(k, 1)
		w.clockBack()
	}
	return before != *k
}

// settle renumbers places and fences, so that only their order counts.
func (m *model) settle(w *world) {
	var places [32]*int8
	var fences [2*maxCallers + 2]*int8
	f := append(fences[:0], &w.keys.f, &w.started)
	for i := range w.callers {
		f = append(f, &w.callers[i].fence, &w.callers[i].answer.fence)
	}
	renumber(f)
	if !m.exact(w) {
		w.clock = 0
		p := w.places(places[:0])
		if m.supersedes {
			p = w.moments(p)
		}
		renumber(p)
	}
	slices.SortFunc(w.late[:], func(a, b message) int {
		return cmp.Or(-cmp.Compare(a.kind, b.kind), cmp.Compare(a.who, b.who), cmp.Compare(a.mode, b.mode), cmp.Compare(a.place, b.place), cmp.Compare(a.moment, b.moment))
	})
}

// places are those that Redis has given.
func (w *world) places(all []*int8) []*int8 {
	all = append(all, &w.keys.n)
	for i := range w.callers {
		c := &w.callers[i]
		all = append(all, &c.place, &c.op.place, &c.answer.place, &w.keys.line[i].place)
	}
	for i := range w.late {
		all = append(all, &w.late[i].place)
	}
	return all
}

func renumber(ranks []*int8) {
	var taken [2]uint64
	for _, rank := range ranks {
		taken[*rank/64] |= 1 << (*rank % 64)
	}
	taken[0] &^= 1 // 0 is none
	for _, rank := range ranks {
		if *rank < 64 {
			*rank = int8(bits.OnesCount64(taken[0] & (2<<*rank - 1)))
		} else {
			*rank = int8(bits.OnesCount64(taken[0]) + bits.OnesCount64(taken[1]&(2<<(*rank-64)-1)))
		}
	}
}

// drain has luck return: whoever lives does at once what is due, and of those who wait only the
// first of each process asks, once in half a second. It returns how many ticks it takes until
// somebody who waits starts, and fails if that, or that of the next one, is too long. The clock of moments
// stands still meanwhile: nobody comes any more, and what was sent arrives. (So nobody may be slow where
// Redis's clock steps back: that a moment is in its future is forgotten.)
func (m *model) drain(w world) int8 {
	w.late = [3]message{}
	w.ticks, w.slow, w.faults, w.crashes, w.leaves, w.meddles, w.started, w.clock = 1, 0, 0, 0, 0, 0, 0, 0
	m.settle(&w)
	if ticks, ok := m.drained[w]; ok {
		return ticks
	}
	m.drained[w] = never // in case it comes round again
	next := w
	ticks := int8(0)
	if m.any(&w, running, lost, leaving, waiting) {
		m.halfSecond(&next)
		if next.started == 0 && m.any(&w, waiting) {
			ticks = 1
		}
		if further := m.drain(next); ticks > 0 {
			ticks += min(further, never-1)
		}
	} else {
		check(m.unlucky() || w.keys.t == 0 && w.keys.line[0].who == 0, "after the end there is still %+v", w.keys)
		m.checkEnd(&w)
	}
	limit := m.limit(&w)
	check(ticks <= limit, "nobody starts for %d ticks, want %d at most, from %+v", ticks, limit, w)
	m.drained[w] = ticks
	return ticks
}

// unlucky is true where traces may stay that nobody but time removes.
func (m *model) unlucky() bool { return m.faults+m.crashes+m.meddles > 0 }

// any is true if a caller is in one of the stages.
func (m *model) any(w *world, stages ...int8) bool {
	return slices.ContainsFunc(w.callers[:], func(c callerState) bool { return slices.Contains(stages, c.stage) })
}

func (m *model) halfSecond(w *world) {
	asked := [2]bool{}
	for range 2 {
		for i := range int8(len(m.callers)) {
			for m.do(w, action{do: execute, who: i}) || m.do(w, action{do: receive, who: i}) || m.do(w, action{do: open, who: i}) ||
				w.callers[i].stage != waiting && m.do(w, action{do: release, who: i}) {
			}
		}
		for i := range int8(len(m.callers)) {
			_ = w.callers[i].due && m.do(w, action{do: ask, who: i})
		}
		for process := range asked {
			if first := m.firstOf(w, int8(process)); !asked[process] && first >= 0 {
				asked[process] = m.do(w, action{do: ask, who: first})
			}
		}
	}
	for i := range int8(len(m.callers)) {
		for m.do(w, action{do: execute, who: i}) || m.do(w, action{do: receive, who: i}) {
		}
	}
	m.tick(w)
}

// firstOf returns who asks for all of a process's callers that wait, or -1.
func (m *model) firstOf(w *world, process int8) int8 {
	first := int8(-1)
	for i := range int8(len(m.callers)) {
		c := &w.callers[i]
		if m.callers[i].process == process && c.stage == waiting && !c.superseded &&
			(first < 0 || c.place != 0 && (w.callers[first].place == 0 || c.place < w.callers[first].place)) {
			first = i
		}
	}
	return first
}

// limit is how many ticks it may take until somebody starts.
func (m *model) limit(w *world) int8 {
	k := &w.keys
	lives := func(who int8) bool {
		return who > 0 && w.callers[who-1].stage != gone && !w.crashed[m.callers[who-1].process]
	}
	limit := int8(3) // the keys count whole seconds, and nobody asks more often than each half second
	holds := lives(k.t) && m.isHolders(k)
	if holds && w.callers[k.t-1].stage == leaving {
		holds = !w.callers[k.t-1].executed // otherwise its release was overtaken by what it is to take back
	}
	if holds && w.callers[k.t-1].stage == waiting {
		holds = w.callers[k.t-1].due || m.firstOf(w, m.callers[k.t-1].process) == k.t-1 // it is about to ask
	}
	if !holds {
		limit += max(0, m.blockedUntil(k)-w.now)
	}
	var dead [2]bool
	for _, entry := range k.line {
		if entry.who == 0 || lives(entry.who) && w.callers[entry.who-1].stage == waiting {
			continue
		}
		caller := m.callers[entry.who-1]
		if !w.crashed[caller.process] {
			// A request that came after its sender had left: a whole lease, at most.
			limit += (caller.lease + 2) * perSecond
		} else if !dead[caller.process] {
			dead[caller.process] = true
			limit += 3 * perSecond
		}
	}
	return limit
}

// explore visits every state of a case, nearest first, until a violation, which it returns with the
// way there.
func (m *model) explore() (states, steps int, broken string) {
	first := world{ticks: m.ticks, slow: m.slow, faults: m.faults, crashes: m.crashes, leaves: m.leaves, meddles: m.meddles}
	if m.supersedes {
		first.clock = arrivalGap
	}
	k := &first.keys
	k.main, k.mainEnd, k.e, k.l, k.lineEnd, k.alive, k.aliveEnd = never, never, never, never, never, [2]int8{never, never}, never
	type visit struct {
		from int32
		by   action
	}
	seen := map[world]struct{}{first: {}}
	queue, visits := []world{first}, []visit{{}}
	for at := 0; at < len(queue); at++ {
		for do := range int8(actions) {
			for who := range int8(max(maxCallers, len(m.meddle))) {
				for _, slow := range []bool{false, true} {
					if slow && do != ask && do != execute && do != renew && do != release && do != leave && do != open {
						continue
					}
					next, a := queue[at], action{do, who, slow}
					happened, wrong := m.try(&next, a)
					if wrong != "" {
						var trace []string
						for i, by := at, a; ; i, by = int(visits[i].from), visits[i].by {
							trace = append(trace, fmt.Sprintf("%d %s %v", by.who+1, actionNames[by.do], by.slow))
							if i == 0 {
								break
							}
						}
						slices.Reverse(trace)
						return len(queue), steps, fmt.Sprintf("%s, after:\n%s", wrong, strings.Join(trace, "\n"))
					}
					if !happened {
						continue
					}
					steps++
					if _, ok := seen[next]; !ok {
						seen[next] = struct{}{}
						queue = append(queue, next)
						visits = append(visits, visit{int32(at), a})
					}
				}
			}
		}
	}
	return len(queue), steps, ""
}

func (m *model) try(w *world, a action) (happened bool, wrong string) {
	defer func() {
		switch v := recover().(type) {
		case nil:
		case violation:
			wrong = string(v)
		default:
			panic(v)
		}
	}()
	if !m.do(w, a) {
		return false, ""
	}
	m.drain(*w)
	return true, ""
}
