package lock

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// lines are what this process knows of the locks that somebody here holds or wants. Who comes
// next is the Store's decision, for those who wait here as for those who wait elsewhere; here
// is decided who asks it, and how many may wait.
type lines struct {
	mu      sync.Mutex
	byKey   map[string]*line
	byToken map[Token]*waiter // in a line
	users   int               // callers, and releases in the background
	closed  func() error      // once set, called when the last user is gone
	idle    chan struct{}     // closed after that

	closeErr error // of closed; read it when idle is closed
}

type line struct {
	callers int       // from enter to leave
	holder  *Handle   // here; nil: nobody
	local   bool      // the holder's lock is: see OrLocal
	lost    int       // holders of lost locks that have not stopped yet
	waiting []*waiter // by place; those whom the Store has not given one yet come last
	patient int       // how many of them were refused and wait for their turn
	asked   time.Time // when somebody in line last asked the Store and was not given the lock
	until   time.Time // when the lock that is in the way ends, as the Store said; zero: not known
	length  int       // of the line in all processes, as the Store said
}

// A waiter is a caller that stands in line if it is refused.
type waiter struct {
	handle  *Handle
	line    *line
	orLocal bool

	supersedes bool

	wake  chan struct{} // has an element after nudge
	due   atomic.Bool   // it is to ask, and not only to see whether it is the first by now
	given chan gift     // gets one at most; an empty one if superseded

	place      int64 // in the Store's line; guarded by lines.mu, as the rest
	patient    bool
	superseded bool // whatever the Store says: a newer one waits here

	askedBefore time.Time // the line's asked before its last question
}

// A gift is a lock that a waiter got from somebody in this process.
type gift struct {
	local bool // there is no Store to ask
	grant Grant
	t0    time.Time // from before the Store was asked
}

// A prospect is what a caller may hope for, as far as this process knows.
type prospect int

const (
	mayTake   prospect = iota // the lock
	mayLineUp                 // a place: the lock is held here
	mustNot                   // nothing: others wait, and it cannot
)

var errClosed = &UnavailableError{Err: errors.New("locker is closed")}

func newLines() *lines {
	return &lines{byKey: make(map[string]*line), byToken: make(map[Token]*waiter), idle: make(chan struct{})}
}

// enter begins an Acquire. It returns an error if the answer is known here: the lock is held
// here and the caller cannot wait, or the line is full. Otherwise leave must follow. w is nil if
// the caller cannot wait.
func (q *lines) enter(h *Handle, r request) (w *waiter, p prospect, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed != nil {
		return nil, mustNot, errClosed
	}
	ln := q.byKey[h.key]
	if ln == nil {
		ln = &line{}
	}
	patience := r.wait > 0 && r.queue > 0
	full := ln.full(r.queue, r.supersedes)
	switch {
	case ln.holder != nil && (r.wait <= 0 || full) && r.delivery != "":
		p = mustNot // only the Store knows what was handled
	case ln.holder != nil && r.wait <= 0:
		return nil, mustNot, &HeldError{Why: Held, Line: max(ln.patient, ln.length)}
	case ln.holder != nil && full:
		return nil, mustNot, &LineFullError{Why: Held, Line: max(ln.patient, ln.length)}
	case ln.holder != nil:
		p = mayLineUp
	case len(ln.waiting) > 0 && (!patience || full):
		p = mustNot // though whether the Store is there, only the Store can say
	}
	q.byKey[h.key] = ln
	ln.callers++
	q.users++
	if patience && p != mustNot {
		w = &waiter{handle: h, line: ln, orLocal: r.orLocal, supersedes: r.supersedes, wake: make(chan struct{}, 1), given: make(chan gift, 1)}
		q.lineUp(w)
	}
	return w, p, nil
}

// leave ends what enter began.
func (q *lines) leave(key string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := q.byKey[key]
	if ln.callers--; ln.callers == 0 {
		delete(q.byKey, key)
	}
	q.doneLocked()
}

// lineUp must be called with q.mu held, as all that follows with a line's or a waiter's name.
func (q *lines) lineUp(w *waiter) {
	rank := func(w *waiter) int64 {
		if w.place == 0 {
			return math.MaxInt64
		}
		return w.place
	}
	waiting := w.line.waiting
	i := sort.Search(len(waiting), func(i int) bool { return rank(waiting[i]) > rank(w) })
	w.line.waiting = slices.Insert(waiting, i, w)
	q.byToken[w.handle.claim.Token] = w
}

// stepOut takes a waiter out of the line, if it is there.
func (q *lines) stepOut(w *waiter) {
	if w == nil || q.byToken[w.handle.claim.Token] != w {
		return
	}
	delete(q.byToken, w.handle.claim.Token)
	ln := w.line
	i := slices.Index(ln.waiting, w)
	ln.waiting = slices.Delete(ln.waiting, i, i+1)
	if w.patient {
		ln.patient--
		w.patient = false
	}
	if i == 0 && len(ln.waiting) > 0 {
		ln.waiting[0].nudge(false) // the first now
	}
}

// forget takes a waiter out of the line for good; nil is none.
func (q *lines) forget(w *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.stepOut(w)
}

// nudge has the waiter ask, or at least look whether it is the first by now.
func (w *waiter) nudge(ask bool) {
	if ask {
		w.due.Store(true)
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// nudge has those ask who are the first, have no place yet, or may be superseded.
func (ln *line) nudge() {
	for i, w := range ln.waiting {
		if i == 0 || w.place == 0 || w.supersedes {
			w.nudge(true)
		}
	}
}

// prospect returns what a waiter may hope for that is about to ask, and its place.
func (q *lines) prospect(w *waiter) (prospect, int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := w.line
	w.askedBefore = ln.asked
	ln.asked, ln.until = time.Now(), time.Time{}
	if ln.holder != nil {
		return mayLineUp, w.place
	}
	return mayTake, w.place
}

// refused notes what the Store said to a waiter.
func (q *lines) refused(w *waiter, held *HeldError) {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := w.line
	ln.length = held.Line
	ln.until = time.Time{}
	if held.For > 0 {
		ln.until = time.Now().Add(held.For)
	}
	if held.Place == 0 {
		return
	}
	again := w.patient
	if w.supersedes {
		defer q.supersede(ln)
	}
	if q.byToken[w.handle.claim.Token] == w && w.place != held.Place {
		q.stepOut(w)
		w.place = held.Place
		q.lineUp(w)
		if again {
			w.patient = true
			ln.patient++
		}
	}
	if held.NewPlace && again && ln.waiting[0] == w {
		// The Store had lost it, and so the others, too.
		for _, other := range ln.waiting[1:] {
			other.nudge(true)
		}
	}
}

// stay is false if as many as limit wait already. One that may have taken the place of another in the
// Store stays in any case.
func (q *lines) stay(w *waiter, limit int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := w.line
	if q.byToken[w.handle.claim.Token] != w {
		return true // it has been given the lock meanwhile
	}
	if ln.full(limit, w.supersedes) && !(w.supersedes && w.place != 0) {
		return false
	}
	w.patient = true
	ln.patient++
	return true
}

// full is true if as many as limit wait, not counting the one whose place a newcomer would take.
func (ln *line) full(limit int, supersedes bool) bool {
	n := ln.patient
	if supersedes && slices.ContainsFunc(ln.waiting, func(w *waiter) bool { return w.patient && w.supersedes }) {
		n--
	}
	return n >= limit
}

// others returns how many others wait, as far as is known.
func (q *lines) others(h *Handle) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := q.byKey[h.key]
	return max(ln.patient, ln.length, 1) - 1
}

// take makes h the holder here, to whom the Store gave the lock. displaced is the one who was
// it until now: the Store has forgotten it. taken is false while somebody here holds the lock
// without the Store, and for one that is superseded.
func (q *lines) take(h *Handle, w *waiter) (displaced *Handle, taken bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := q.byKey[h.key]
	if ln.holder == h {
		return nil, true
	}
	if ln.holder != nil && ln.local || w != nil && w.superseded {
		return nil, false
	}
	displaced = ln.holder
	ln.holder, ln.local = h, false
	q.stepOut(w)
	if w != nil {
		ln.asked = w.askedBefore
	}
	return displaced, true
}

// takeLocally makes h the holder here without the Store, unless somebody is, or was and has not
// stopped.
func (q *lines) takeLocally(h *Handle, w *waiter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := q.byKey[h.key]
	if ln.holder != nil || ln.lost > 0 || w != nil && w.superseded {
		return false
	}
	ln.holder, ln.local = h, true
	q.stepOut(w)
	return true
}

// heldHere returns why h cannot have the lock, if somebody else here has it, or had it and has not
// stopped; and otherwise nothing.
func (q *lines) heldHere(h *Handle) Reason {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := q.byKey[h.key]
	other := ln.holder
	switch {
	case other != nil && other != h && h.claim.Token.sameDelivery(other.claim.Token):
		return SameDelivery
	case other != nil && other != h || ln.lost > 0:
		return Held
	}
	return ""
}

// back has a waiter ask again that was given the lock too late to use it.
func (q *lines) back(w *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w.line.holder == w.handle {
		w.line.holder = nil
	}
	select {
	case <-w.given: // older than what it hears next
	default:
	}
	w.patient = true
	w.line.patient++
	q.lineUp(w)
	w.nudge(true)
}

// pass notes that token is done with the lock, or with waiting for it, and gives the lock to
// next if that waits here. With the Store away it goes to the next one here that wants it
// without the Store.
func (q *lines) pass(key string, token Token, next Successor, t0 time.Time, released, away bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := q.byKey[key]
	if ln == nil {
		return
	}
	if ln.holder != nil && ln.holder.claim.Token == token {
		ln.holder = nil
		released = true
	}
	w := q.byToken[next.Token]
	switch {
	case w != nil && ln.holder == nil && next.Token.delivery() == "":
		q.give(w, gift{grant: next.Grant, t0: t0})
	case w != nil: // whether its delivery was handled meanwhile, the Store knows
		w.nudge(true)
	case next.Token != "" || !released || ln.holder != nil:
	default:
		i := slices.IndexFunc(ln.waiting, func(w *waiter) bool { return w.orLocal })
		if away && ln.lost == 0 && i >= 0 {
			q.give(ln.waiting[i], gift{local: true})
		} else {
			ln.nudge()
		}
	}
}

func (q *lines) give(w *waiter, g gift) {
	w.line.holder, w.line.local = w.handle, g.local
	q.stepOut(w)
	w.given <- g
}

// lose notes that the holder's lock is lost. It may go on for a while.
func (q *lines) lose(h *Handle) {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := q.byKey[h.key]
	ln.lost++
	if ln.holder == h {
		ln.holder = nil
		ln.nudge()
	}
}

// stopped notes that the holder of a lost lock has come to its end.
func (q *lines) stopped(h *Handle) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.byKey[h.key].lost--
}

// pause returns how long a waiter waits before it asks unless it is woken; it is negative for
// all but the first, who asks for the others, too, and those that may be superseded without being told.
// poll is for when nobody tells it of the lock's end.
func (q *lines) pause(w *waiter, polls bool, poll time.Duration) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln := w.line
	switch {
	case len(ln.waiting) > 0 && ln.waiting[0] == w:
	case polls && w.supersedes:
		return Heartbeat
	default:
		return -1
	}
	if polls && ln.holder == nil {
		return time.Millisecond + rand.N(poll)
	}
	pause := Heartbeat - time.Since(ln.asked)
	if !ln.until.IsZero() {
		pause = min(pause, time.Until(ln.until))
	}
	return max(pause, minPoll)
}

// handed has the waiter ask whose token the lock was handed over to.
func (q *lines) handed(token Token) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w := q.byToken[token]; w != nil {
		w.nudge(true)
	}
}

// nudgeAll has those ask who are the first of their line, or have no place yet.
func (q *lines) nudgeAll() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, ln := range q.byKey {
		ln.nudge()
	}
}

// renewAll has the locks renewed that are held here.
func (q *lines) renewAll() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, ln := range q.byKey {
		if ln.holder != nil {
			ln.holder.owner.hurryUp()
		}
	}
}

// close calls closed when the last user is gone, which may be now, and returns a channel that is
// closed after that.
func (q *lines) close(closed func() error) <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed == nil {
		q.closed = closed
		q.endIfIdle()
	}
	return q.idle
}

// retain keeps close from closing until done is called.
func (q *lines) retain() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.users++
}

func (q *lines) done() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.doneLocked()
}

func (q *lines) doneLocked() {
	q.users--
	q.endIfIdle()
}

// endIfIdle does not wait for the closing.
func (q *lines) endIfIdle() {
	if q.closed != nil && q.users == 0 {
		go func() {
			q.closeErr = q.closed()
			close(q.idle)
		}()
	}
}
