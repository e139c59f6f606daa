package lock

import (
	"cmp"
	"slices"
	"strings"
)

// What the model knows of callers whose tokens have a mark: those that supersede one another, and
// those that handle a delivery.

const deliveries = 2

// What becomes of a caller; noted only of those that have a mark.
const (
	ran        = iota + 1
	quit       // it left, was not to wait, got no answer, or its process crashed
	done       // it heard that its delivery was handled
	superseded // it heard so
)

// Modes of a release.
const (
	asWaiter    = 1
	handledWell = 2
)

// marks is what has happened, whatever the keys say of it.
type marks struct {
	newest  int8 // who was the last that got a place, or the lock, and supersedes others
	delayed bool // it counts as newer than it is: its request was executed later than it was sent
	late    bool // it became the newest by a request for whose answer it waited no longer
	owes    int8 // who took the place of others, by a request that was not late, and has not begun yet
	handled [deliveries]bool
	lost    bool // a lock that had begun, with a mark
}

func (c modelCaller) supersedes() bool { return strings.HasSuffix(c.mark, superseding) }

// delivery is which one the caller handles, from 1; 0 is none.
func (c modelCaller) delivery() int8 {
	if c.mark == "" || c.mark == superseding {
		return 0
	}
	return int8(c.mark[1]-'a') + 1
}

// deliveries is how many the case has.
func (m *model) deliveries() int {
	n := int8(0)
	for _, caller := range m.callers {
		n = max(n, caller.delivery())
	}
	return int(n)
}

// end notes what becomes of a caller. One that has begun has had what it wanted.
func (m *model) end(w *world, who, fate int8) {
	if c := &w.callers[who]; m.callers[who].mark != "" && c.fate != ran {
		c.fate = fate
	}
	if fate == ran && w.marks.owes == who+1 {
		w.marks.owes = 0
	}
}

func (m *model) lost(w *world, who int8) {
	w.marks.lost = w.marks.lost || m.callers[who].mark != ""
}

// arrive notes when a caller comes.
func (m *model) arrive(w *world, who int8) {
	w.advance(arrivalGap)
	switch {
	case !m.callers[who].supersedes():
	case w.clock > 0:
		w.callers[who].came = w.clock
	default:
		w.callers[who].came = newest
	}
}

// advance has the clock go on. What is under way meanwhile makes its sender younger.
func (w *world) advance(by int8) {
	if w.clock == 0 {
		return
	}
	w.clock += by
	for i := range w.callers {
		if c := &w.callers[i]; c.op.moment > 0 {
			c.op.moment += by
		}
	}
	for i := range w.late {
		if w.late[i].moment > 0 {
			w.late[i].moment += by
		}
	}
}

// clockBack sets Redis's clock back by a second, for which what Redis gave before is in its future.
func (w *world) clockBack() {
	if w.clock == 0 {
		return
	}
	for _, place := range w.places(nil) {
		if *place > 0 {
			*place += perSecond * tickGap
		}
	}
}

// exact is true if it matters how far moments are apart, and not only which is the later one.
func (m *model) exact(w *world) bool {
	if w.clock == 0 {
		return false
	}
	underWay := func(request message) bool { return request.moment > 0 }
	return w.slow > 0 || slices.ContainsFunc(w.late[:], underWay) ||
		slices.ContainsFunc(w.callers[:], func(c callerState) bool { return underWay(c.op) }) ||
		slices.Contains(m.meddle, stepBack) && (w.meddles > 0 || w.keys.n > w.clock)
}

// moments appends those that come from callers.
func (w *world) moments(all []*int8) []*int8 {
	for i := range w.callers {
		all = append(all, &w.callers[i].came, &w.callers[i].op.moment)
	}
	for i := range w.late {
		all = append(all, &w.late[i].moment)
	}
	return all
}

// supersede has the one with the last place in a process supersede all others there that have a place. So
// what a late request made of its sender's place is not known there: see marks.late.
func (m *model) supersede(w *world, process int8) {
	rank := func(who int8) int8 {
		if w.callers[who].place == 0 {
			return never // with a mutant
		}
		return w.callers[who].place
	}
	var rivals []int8
	for i := range int8(len(m.callers)) {
		o := &w.callers[i]
		if m.callers[i].process == process && m.callers[i].supersedes() && o.stage == waiting && !o.gift && !o.superseded &&
			(o.place > 0 || m.mutant == placelessStays) {
			rivals = append(rivals, i)
		}
	}
	slices.SortStableFunc(rivals, func(a, b int8) int { return cmp.Compare(rank(a), rank(b)) })
	if m.mutant == oldestStays {
		slices.Reverse(rivals)
	}
	for _, rival := range rivals[:max(0, len(rivals)-1)] {
		if rank(rival) == rank(rivals[len(rivals)-1]) {
			continue
		}
		if !w.callers[rival].modest {
			m.checkSuperseded(w, rival+1)
		}
		w.callers[rival].superseded = true
	}
}

// checkSuperseded is about a caller that hears so.
func (m *model) checkSuperseded(w *world, who int8) {
	newest := w.marks.newest
	check(newest != who || w.marks.late, "caller %d is superseded, and is the newest", who)
	check(newest > 0 && (newest == who || w.marks.delayed || w.callers[who-1].came < w.callers[newest-1].came), "caller %d is superseded by none that is newer", who)
}

// checkGift is about a caller that begins on what another one of its process left.
func (m *model) checkGift(w *world, who int8) {
	d := m.callers[who].delivery()
	check(d == 0 || !w.marks.handled[d-1], "caller %d begins with a delivery that was handled", who+1)
}

// checkMarks is about what a script did and said.
func (m *model) checkMarks(w *world, before *modelKeys, request message, a answer, late bool) {
	caller, k, marks := m.callers[request.who-1], &w.keys, &w.marks
	if d := caller.delivery(); d > 0 && request.kind == acquireRequest {
		handled := marks.handled[d-1]
		check(!handled || a.no == done, "caller %d asks for a delivery that was handled, and does not hear so", request.who)
		check(handled || a.no != done, "caller %d hears that its delivery was handled", request.who)
	} else if request.mode == handledWell && request.kind == releaseRequest {
		marks.handled[d-1] = true
	}

	// rival is true if an entry was in line that supersedes others, is not of who asks, and lives, as far as
	// Redis knew.
	rival := func(entry struct{ who, place int8 }) bool {
		if entry.who == 0 || entry.who == request.who || !m.callers[entry.who-1].supersedes() {
			return false
		}
		process := m.callers[entry.who-1].process
		return process == caller.process || before.alive[process] != never && before.alive[process] >= w.now
	}
	again := before.t > 0 && before.t != request.who && caller.delivery() > 0 && m.callers[before.t-1].delivery() == caller.delivery() &&
		m.isOwned(before)
	if again && request.kind == acquireRequest {
		w.callers[request.who-1].modest = true // it supersedes nobody
	}
	standing := 0
	for _, entry := range k.line {
		if entry.who > 0 && m.callers[entry.who-1].supersedes() && !w.callers[entry.who-1].modest {
			standing++
		}
	}
	check(standing <= 1, "%d stand in line that supersede one another", standing)
	if request.kind != acquireRequest || !caller.supersedes() || a.no == done {
		return
	}
	if a.no == superseded {
		check(before.t != request.who || !m.isHolders(before) || w.now >= before.e, "caller %d is superseded, and has the lock", request.who)
		switch {
		case again:
			newer := marks.newest != 0 && marks.newest != request.who && before.n > request.place && request.place > 0
			check(newer || slices.ContainsFunc(before.line[:], rival), "caller %d is superseded, and nobody waits", request.who)
		case !w.callers[request.who-1].modest:
			m.checkSuperseded(w, request.who)
		}
		return
	}
	if w.callers[request.who-1].modest {
		return
	}
	if marks.newest == request.who || a.yes && before.t == request.who && before.f == k.f {
		return // it had the place, or the lock, before
	}
	delayed := request.moment > w.callers[request.who-1].came
	check(marks.newest == 0 || delayed || w.callers[request.who-1].came > w.callers[marks.newest-1].came,
		"caller %d gets the place of caller %d, which is newer", request.who, marks.newest)
	marks.newest, marks.delayed, marks.late = request.who, delayed, late
	switch {
	case late:
		marks.owes = 0
	case slices.ContainsFunc(before.line[:], rival):
		marks.owes = request.who
	}
}

// checkEnd is for when nobody is left: whoever was to run has run.
func (m *model) checkEnd(w *world) {
	for i, caller := range m.callers {
		fate := w.callers[i].fate
		check(w.callers[i].stage == absent || caller.mark == "" || fate != 0, "caller %d ends without having run", i+1)
	}
	marks := &w.marks
	// What it handles may have been handled by one that had lost its lock.
	check(marks.owes == 0 || marks.lost || w.callers[marks.owes-1].fate != done, "caller %d takes a place, and does not run", marks.owes)
	check(marks.newest == 0 || marks.late || w.callers[marks.newest-1].fate != superseded, "caller %d is the newest, and is superseded", marks.newest)
}
