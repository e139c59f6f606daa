package lock

import (
	"context"
	"errors"
	"time"
)

// Where nobody tells the first in line of the lock's end, it asks again after a random part of
// minPoll, doubled with each refusal up to maxPoll.
const (
	minPoll = 4 * time.Millisecond
	maxPoll = 64 * time.Millisecond
)

// An acquisition is one call of Acquire, until the lock is taken or it has given up. All of its
// attempts have the same token: one that went unanswered is asked again by that.
type acquisition struct {
	ctx     context.Context
	locker  *Locker
	request request
	handle  *Handle
	arrived time.Time

	waiter *waiter // nil: it cannot wait
	placed bool    // the Store may have it in the line
	why    Reason  // it was refused
	away   error   // the last answer was that there is none; nil: there was one
	polls  bool    // nobody will tell of the lock's end
	poll   time.Duration

	patience *time.Timer // once it waits
}

func (a *acquisition) run() (h *Handle, err error) {
	w, prospect, err := a.locker.lines.enter(a.handle, a.request)
	if err != nil {
		return nil, err
	}
	a.waiter = w
	defer func() {
		if h == nil {
			err = a.giveUp(err)
		}
	}()
	if prospect == mustNot {
		err = a.turnAway()
	} else {
		err = a.ask()
	}
	if err == nil && a.ctx.Err() != nil {
		err = context.Cause(a.ctx) // it left while the Store was answering
	}
	if err != nil {
		return nil, err
	}
	return a.handle, nil
}

func (a *acquisition) outage() *outage { return a.locker.outages.of(a.handle.key) }

// turnAway is for callers that cannot wait where others do.
func (a *acquisition) turnAway() error {
	err := a.look()
	if errors.Is(err, ErrUnavailable) {
		err = a.doWithout(err)
		if !errors.Is(err, ErrHeld) {
			return err
		}
	}
	switch {
	case errors.Is(err, ErrDone):
		return err
	case err == nil && a.request.delivery != "":
		return a.ask() // it is free by now, and not this delivery's fault that others wait
	case a.request.wait > 0:
		return a.lineFull()
	}
	if held, ok := errors.AsType[*HeldError](err); ok {
		return held
	}
	return &HeldError{Why: Held} // just now it is free, but not for this one
}

// look finds out, without asking for the lock, why it is not to be had.
func (a *acquisition) look() error {
	op := a.locker.operation(a.ctx)
	done, err := a.outage().admit(op)
	if err != nil {
		return err
	}
	defer done()
	err = a.locker.store.Inspect(op, a.handle.key, a.handle.claim.Token)
	a.locker.outages.report(a.handle.key, err)
	if held, ok := errors.AsType[*HeldError](err); ok {
		a.why = held.Why
	}
	return err
}

// ask asks for the lock, and waits in line for it, until there is an end to that.
func (a *acquisition) ask() error {
	for {
		err := a.attempt()
		a.away = nil
		if errors.Is(err, ErrUnavailable) {
			a.away = err
			a.polls = true
			err = a.doWithout(err)
		}
		if err == nil || errors.Is(err, ErrDone) || errors.Is(err, ErrSuperseded) {
			return err
		}
		if a.patience == nil {
			if err := a.stay(err); err != nil {
				return err
			}
			defer a.patience.Stop()
		}
		if again, err := a.await(); !again {
			return err
		}
	}
}

// attempt asks once. It is not cut short when the caller leaves: an answer that nobody waits for
// would leave a lock behind.
func (a *acquisition) attempt() error {
	l, h, w := a.locker, a.handle, a.waiter
	op := l.operation(a.ctx)
	outage := a.outage()
	if a.patience == nil {
		done, err := outage.admit(op)
		if err != nil {
			return err
		}
		defer done()
	}
	if err := l.clearLeftovers(op, h.key); err != nil {
		return err
	}
	claim := h.claim
	if w != nil {
		var p prospect
		p, claim.Place = l.lines.prospect(w)
		claim.Wait, claim.LineUp, claim.Since = true, p == mayLineUp, a.arrived
	}
	t0 := time.Now() // before asking: the grant may be older than its answer
	grant, err := l.store.Acquire(op, h.key, claim)
	a.locker.outages.report(a.handle.key, err)
	if err == nil {
		return a.take(grant, t0)
	}
	if away, ok := errors.AsType[*UnavailableError](err); ok && away.Doubtful {
		h.doubtful = true
	}
	if errors.Is(err, ErrDone) {
		a.placed = true // it may have been handed over
	}
	if held, ok := errors.AsType[*HeldError](err); ok {
		a.why = held.Why
		a.polls = held.Why == ForeignHolder || held.Why == ForeignValue
		if w != nil {
			a.placed = true
			l.lines.refused(w, held)
		}
	}
	return err
}

// take begins the lock's life here.
func (a *acquisition) take(grant Grant, t0 time.Time) error {
	displaced, taken := a.locker.lines.take(a.handle, a.waiter)
	if displaced != nil {
		displaced.lose(&LostError{Why: NotOwner})
	}
	if taken && a.handle.hold(a.ctx, grant, t0) {
		return nil
	}
	a.handle.doubtful = true
	switch {
	case !taken:
		// Somebody here has it without the Store, which has come back meanwhile; or the caller is
		// superseded, of which it hears while it waits.
		return &HeldError{Why: Held}
	case a.patience != nil:
		a.locker.lines.back(a.waiter)
		return &HeldError{Why: Held}
	}
	return &UnavailableError{Doubtful: true, Err: errors.New("the answer came after the lease had passed")}
}

// doWithout says what an absent Store means: nothing if the lock can be taken without it,
// contention if somebody here has it, and otherwise err.
func (a *acquisition) doWithout(err error) error {
	if a.request.orLocal && a.locker.lines.takeLocally(a.handle, a.waiter) {
		a.holdLocally()
		return nil
	}
	if why := a.locker.lines.heldHere(a.handle); why != "" {
		a.why = why
		return &HeldError{Why: why}
	}
	return err
}

// holdLocally begins the life of a lock that the Store does not know of, though it may have the
// token: by an attempt without an answer, or in its line.
func (a *acquisition) holdLocally() {
	a.handle.doubtful = a.handle.doubtful || a.placed
	a.handle.holdLocally(a.ctx)
}

// stay decides whether a caller that was refused for the first time waits.
func (a *acquisition) stay(refusal error) error {
	remaining := a.request.wait - time.Since(a.arrived)
	switch {
	case a.request.wait <= 0 || !errors.Is(refusal, ErrHeld):
		return refusal
	case a.waiter == nil || !a.locker.lines.stay(a.waiter, a.request.queue):
		return a.lineFull()
	case remaining <= 0:
		return a.timeOut()
	}
	a.patience = time.NewTimer(remaining)
	a.poll = minPoll
	a.locker.listen.Do(a.locker.hear)
	return nil
}

// await waits in line. It returns true when it is time to ask; otherwise the lock is taken, or
// there is an error.
func (a *acquisition) await() (again bool, err error) {
	lines, h, w := a.locker.lines, a.handle, a.waiter
	for {
		var turn <-chan time.Time
		if pause := lines.pause(w, a.polls || !a.locker.hears.Load(), a.poll); pause >= 0 {
			turn = time.After(pause)
		}
		select {
		case g := <-w.given:
			switch {
			case g == gift{}:
				return false, ErrSuperseded
			case g.local:
				a.holdLocally()
			case !h.hold(a.ctx, g.grant, g.t0):
				lines.back(w)
				continue
			}
			return false, nil
		case <-w.wake:
			if w.due.Swap(false) {
				a.poll = minPoll
				return true, nil
			}
		case <-turn:
			a.poll = min(2*a.poll, maxPoll)
			return true, nil
		case <-a.patience.C:
			away := a.outage().current()
			if away == nil {
				away = a.away
			}
			if away == nil && a.request.supersedes {
				// It may be superseded, without having heard of that.
				switch err := a.attempt(); {
				case errors.Is(err, ErrUnavailable):
					away = err
				case !errors.Is(err, ErrHeld):
					return false, err
				}
			}
			if away != nil {
				err := a.doWithout(away)
				if !errors.Is(err, ErrHeld) {
					return false, err
				}
			}
			return false, a.timeOut()
		case <-a.ctx.Done():
			return false, context.Cause(a.ctx)
		}
	}
}

func (a *acquisition) lineFull() error {
	return &LineFullError{Why: a.why, Line: a.locker.lines.others(a.handle) + 1}
}

// timeOut looks once more on behalf of a delivery, as the one in the way may be another one by now.
func (a *acquisition) timeOut() error {
	if a.locker.lines.isSuperseded(a.waiter) {
		return ErrSuperseded // it has not heard of it yet
	}
	if a.request.delivery != "" && a.outage().current() == nil {
		err := a.look()
		if errors.Is(err, ErrDone) {
			return err
		}
		if errors.Is(err, ErrUnavailable) {
			if a.why = a.locker.lines.heldHere(a.handle); a.why == "" {
				return err
			}
		}
	}
	return &TimeoutError{Why: a.why, Line: a.locker.lines.others(a.handle)}
}

// giveUp takes an acquisition that failed back. It leaves no trace: its place, and a lock that
// it may have been given, go to the next in line. It returns the reason why it failed.
func (a *acquisition) giveUp(reason error) error {
	l, h := a.locker, a.handle
	if h.ctx != nil { // it has the lock, but its caller has left
		_ = h.Release(context.Background())
		return a.failed(reason)
	}
	defer l.lines.leave(h.key)
	l.lines.forget(a.waiter)
	away := a.outage().current() != nil
	switch {
	case h.doubtful || a.placed && away:
		h.leaveBehind() // its caller has waited long enough
		fallthrough
	case !a.placed:
		l.lines.pass(h.key, h.claim.Token, Successor{}, time.Time{}, false, away)
	default:
		// Not for longer than the caller was to wait, and an operation may take.
		err := h.releaseOrLeave(until{context.Background(), a.arrived.Add(a.request.wait + l.opTimeout)})
		if errors.Is(reason, ErrTimeout) && !answered(err) && l.lines.heldHere(h) == "" {
			return a.failed(err)
		}
	}
	return a.failed(reason)
}

// failed tells the error of one that may have taken the place of others from any other.
func (a *acquisition) failed(reason error) error {
	mayHaveDisplaced := a.request.supersedes && (a.placed || a.handle.doubtful || a.handle.granted || a.patience != nil)
	if !mayHaveDisplaced || errors.Is(reason, ErrSuperseded) || errors.Is(reason, ErrDone) {
		return reason
	}
	return &NewestError{Err: reason}
}
