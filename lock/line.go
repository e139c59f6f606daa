package lock

import (
	"container/list"
	"context"
	"errors"
	"sync"
	"time"
)

// lines are the lines of this process: one for each key that somebody here holds or wants. The one who has a line's turn, and nobody else, asks the Store for
// its key; the others wait for the turn, first come, first served.
type lines struct {
	mu     sync.Mutex
	byKey  map[string]*line
	users  int            // of the Store, see retain
	lost   map[string]int // holders of lost locks that have not stopped yet
	closed func() error   // once set, called when the last line and user is gone
	idle   chan struct{}  // closed after that

	closeErr error // of closed; read it when idle is closed
}

type line struct {
	turn    *turn
	waiting list.List // of *waiter, in order of arrival
}

// A waiter stands in line.
type waiter struct {
	// came is the turn that was under way, and undecided, when the waiter came; or nil. If it
	// is decided by an absent Store, the waiter hears the same, as somebody who came for it.
	came  *turn
	offer chan offer // gets one
}

// An offer is the turn, or the reason why waiting for it is over.
type offer struct {
	turn *turn
	err  error
}

// A turn is the right to ask the Store for a key. It begins undecided; its owner settles it
// with each answer, and passes it on at the end, when the lock is given back or given up.
type turn struct {
	lines   *lines
	key     string
	decided chan struct{} // closed with the first verdict
	verdict error         // why nobody else can have the lock; guarded by lines.mu
	waits   bool          // its owner waits, too; guarded by lines.mu
}

// errTurnPassed is the verdict of a turn whose owner left without an answer.
var errTurnPassed = errors.New("turn was passed")

var errClosed = &UnavailableError{Err: errors.New("locker is closed")}

func newLines() *lines {
	return &lines{byKey: make(map[string]*line), lost: make(map[string]int), idle: make(chan struct{})}
}

// join returns the turn for key: at once if there is no line (queued false), or after waiting
// in line. A caller that cannot wait, or no longer, gets the verdict that holds the others
// up, too: whether the lock is held or the Store is away is known only after asking.
func (q *lines) join(ctx context.Context, key string, wait time.Duration, limit int) (t *turn, queued bool, err error) {
	for {
		t, place, err := q.enter(key, wait, limit)
		switch {
		case place != nil:
			t, err = q.await(ctx, key, place, wait)
			return t, true, err
		case err == nil:
			return t, false, nil
		case t == nil:
			return nil, false, err
		}
		switch verdict := t.await(ctx); {
		case ctx.Err() != nil:
			return nil, false, context.Cause(ctx)
		case errors.Is(verdict, errTurnPassed):
			continue // the line may be gone by now
		case errors.Is(verdict, ErrHeld) && errors.Is(err, ErrLineFull):
			return nil, false, err
		default:
			return nil, false, verdict
		}
	}
}

// enter gives the caller the turn or a place in the line. Otherwise it returns why not, and
// the turn whose verdict comes before that.
func (q *lines) enter(key string, wait time.Duration, limit int) (t *turn, place *list.Element, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	ln, busy := q.byKey[key]
	switch {
	case q.closed != nil:
		return nil, nil, errClosed
	case !busy:
		t = q.newTurn(key)
		q.byKey[key] = &line{turn: t}
		return t, nil, nil
	case errors.Is(ln.turn.verdict, ErrUnavailable):
		// Found out already: nobody who comes now waits for another time-out.
		return nil, nil, ln.turn.verdict
	case wait <= 0:
		return ln.turn, nil, ErrHeld
	case ln.length() >= limit:
		return ln.turn, nil, ErrLineFull
	}
	w := &waiter{offer: make(chan offer, 1)}
	if ln.turn.verdict == nil {
		w.came = ln.turn
	}
	return nil, ln.waiting.PushBack(w), nil
}

// length is how many wait, including an owner of the turn who has been refused.
func (ln *line) length() int {
	if ln.turn.waits {
		return ln.waiting.Len() + 1
	}
	return ln.waiting.Len()
}

func (q *lines) newTurn(key string) *turn {
	return &turn{lines: q, key: key, decided: make(chan struct{})}
}

// await waits in line.
func (q *lines) await(ctx context.Context, key string, place *list.Element, wait time.Duration) (*turn, error) {
	patience := time.NewTimer(wait)
	defer patience.Stop()
	select {
	case given := <-place.Value.(*waiter).offer:
		return given.turn, given.err
	case <-ctx.Done():
		if given, _ := q.leave(key, place); given.turn != nil {
			given.turn.pass()
		}
		return nil, context.Cause(ctx)
	case <-patience.C:
		given, ahead := q.leave(key, place)
		if ahead == nil {
			return given.turn, given.err // late, but worth asking once
		}
		verdict := ahead.await(ctx)
		switch {
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case errors.Is(verdict, ErrUnavailable):
			return nil, verdict
		}
		return nil, &TimeoutError{}
	}
}

// leave takes a waiter out of the line. It returns the waiter's offer if that came at the same
// moment, and otherwise the turn that the line waits for.
func (q *lines) leave(key string, place *list.Element) (given offer, ahead *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case given = <-place.Value.(*waiter).offer:
		return given, nil
	default:
		ln := q.byKey[key]
		ln.waiting.Remove(place)
		return offer{}, ln.turn
	}
}

// close calls closed when the last line and user is gone, which may be now, and returns a channel
// that is closed after that.
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
	q.users--
	q.endIfIdle()
}

// endIfIdle must be called with q.mu held. It does not wait for the closing.
func (q *lines) endIfIdle() {
	if q.closed != nil && len(q.byKey) == 0 && q.users == 0 {
		go func() {
			q.closeErr = q.closed()
			close(q.idle)
		}()
	}
}

// linger counts holders of key that go on although their lock is lost.
func (q *lines) linger(key string, change int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.lost[key] += change; q.lost[key] == 0 {
		delete(q.lost, key)
	}
}

func (q *lines) lingers(key string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.lost[key] > 0
}

// settle says why nobody else can have the lock, a *HeldError or an *UnavailableError, and
// whether the owner of the turn waits for it like the others.
func (t *turn) settle(verdict error, waits bool) {
	t.lines.mu.Lock()
	defer t.lines.mu.Unlock()
	t.settleLocked(verdict)
	t.waits = waits
}

func (t *turn) settleLocked(verdict error) {
	if t.verdict == nil {
		close(t.decided)
		if errors.Is(verdict, ErrUnavailable) {
			t.lines.byKey[t.key].dismiss(t, verdict)
		}
	}
	t.verdict = verdict
}

// dismiss sends those away who came during turn t.
func (ln *line) dismiss(t *turn, err error) {
	for place := ln.waiting.Front(); place != nil; {
		next := place.Next()
		if w := place.Value.(*waiter); w.came == t {
			ln.waiting.Remove(place)
			w.offer <- offer{err: err}
		}
		place = next
	}
}

// await waits for the turn's first verdict and returns its latest one. The Store's time-outs
// bound the waiting.
func (t *turn) await(ctx context.Context) error {
	select {
	case <-t.decided:
		t.lines.mu.Lock()
		defer t.lines.mu.Unlock()
		return t.verdict
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// pass gives the turn to the first in line, or ends the line.
func (t *turn) pass() {
	q := t.lines
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.verdict == nil {
		t.settleLocked(errTurnPassed)
	}
	ln := q.byKey[t.key]
	first := ln.waiting.Front()
	if first == nil {
		delete(q.byKey, t.key)
		q.endIfIdle()
		return
	}
	ln.turn = q.newTurn(t.key)
	ln.waiting.Remove(first).(*waiter).offer <- offer{turn: ln.turn}
}
