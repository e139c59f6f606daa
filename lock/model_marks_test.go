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
	newestPlace int8 // that one who supersedes had in the line
	newest      int8 // who had it
	leftTo      int8 // to whom it left its place, in its process
	newestLate  bool // by a request for whose answer it waited no longer
	owes        int8 // who took the place of others, by a request that was not late, and has not begun yet
	handled     [deliveries]bool
	lost        bool // a lock that had begun, with a mark
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

// stay has a caller be one of those that wait, in the place of those that it supersedes in its
// process. One whose place is not known is newer than all others.
func (m *model) stay(w *world, who int8) {
	c := &w.callers[who]
	if !m.callers[who].supersedes() || c.patient {
		return
	}
	c.patient = true
	if c.gift {
		return
	}
	rank := func(who int8) int8 {
		if w.callers[who].place == 0 {
			return never
		}
		return w.callers[who].place
	}
	var rivals []int8
	for i := range int8(len(m.callers)) {
		o := &w.callers[i]
		if m.callers[i].process == m.callers[who].process && o.stage == waiting && o.patient && !o.gift && !o.superseded {
			rivals = append(rivals, i)
		}
	}
	slices.SortStableFunc(rivals, func(a, b int8) int { return cmp.Compare(rank(a), rank(b)) })
	newest := rivals[len(rivals)-1]
	if m.mutant == oldestStays {
		newest = rivals[0]
	}
	for _, rival := range rivals {
		if rival != newest {
			check(rank(rival) <= rank(newest), "caller %d supersedes %d, which is newer", newest+1, rival+1)
			w.callers[rival].superseded = true
			if rival+1 == w.marks.newest || rival+1 == w.marks.leftTo {
				w.marks.leftTo = newest + 1
			}
		}
	}
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

	// rival is true if an entry of a line supersedes others, and is not of who asks.
	rival := func(entry struct{ who, place int8 }) bool {
		return entry.who > 0 && entry.who != request.who && m.callers[entry.who-1].supersedes()
	}
	if a.no == superseded {
		check(marks.newest != request.who || marks.newestLate, "caller %d is superseded, and is the newest", request.who)
		check(request.place < marks.newestPlace, "caller %d is superseded by none that is newer", request.who)
		inLine := slices.ContainsFunc(before.line[:], func(entry struct{ who, place int8 }) bool { return entry.who == request.who })
		check(request.place > 0 || inLine || slices.ContainsFunc(before.line[:], rival), "caller %d is superseded by nobody", request.who)
		check(before.t != request.who || !m.isHolders(before) || w.now >= before.e, "caller %d is superseded, and has the lock", request.who)
	}
	standing, newestPlace := 0, k.n
	for _, entry := range k.line {
		if entry.who > 0 && m.callers[entry.who-1].supersedes() {
			standing++
			newestPlace = max(newestPlace, entry.place)
		}
	}
	check(standing <= 1, "%d stand in line that supersede one another", standing)
	if newestPlace > marks.newestPlace {
		marks.newestPlace, marks.newest, marks.newestLate, marks.leftTo = newestPlace, request.who, late, 0
		switch {
		case late:
			marks.owes = 0
		case slices.ContainsFunc(before.line[:], rival):
			marks.owes = request.who
		}
	}
}

// checkEnd is for when nobody is left: whoever was to run has run.
func (m *model) checkEnd(w *world) {
	for i, caller := range m.callers {
		fate := w.callers[i].fate
		check(w.callers[i].stage == absent || caller.delivery() == 0 || fate != 0, "caller %d ends without having run", i+1)
	}
	marks := &w.marks
	// What it handles may have been handled by one that had lost its lock.
	check(marks.owes == 0 || marks.lost || w.callers[marks.owes-1].fate != done, "caller %d takes a place, and does not run", marks.owes)
	if marks.newest == 0 || marks.newestLate {
		return
	}
	newest := marks.newest
	if marks.leftTo > 0 {
		newest = marks.leftTo // one that got no answer, and is taken for newer
	}
	check(w.callers[newest-1].fate != superseded, "caller %d is the newest, and is superseded", newest)
}
