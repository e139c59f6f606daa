package lock

import (
	"context"
	"errors"
	"sync"
	"time"
)

// A holder counts its lease by its own monotonic clock, from before it asked. Clocks that
// differ in pace by one in a thousand, and a timer that fires late by margin, still let it
// stop before anybody else can have the lock.
const (
	clockDrift = 1000 // one part in
	margin     = 20 * time.Millisecond
)

// A Handle is a lock that was taken. Release it.
type Handle struct {
	locker *Locker
	key    string
	claim  Claim

	granted  bool // the Store said yes
	doubtful bool // the Store may have the token all the same, or get it yet: an attempt went unanswered

	ctx    context.Context
	cancel context.CancelCauseFunc
	fence  int64

	mu       sync.Mutex
	deadline time.Time
	expiry   *time.Timer // ends the belief at the deadline; see watchDeadline
	over     bool        // lost, or being released
	lost     bool

	owner owner

	done     time.Duration // see Done
	release  sync.Once
	released error
}

// hold begins the life of a lock that was granted to an attempt begun at t0. It is false if
// that is over by now.
func (h *Handle) hold(ctx context.Context, grant Grant, t0 time.Time) bool {
	deadline := h.sureUntil(grant, t0)
	h.mu.Lock() // the timer may fire at once
	defer h.mu.Unlock()
	if h.over || !time.Now().Before(deadline) {
		h.over = false // it may be granted again
		return false
	}
	h.granted = true
	h.fence = grant.Fence
	h.deadline = deadline
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	h.owner.start(h, grant, t0)
	return true
}

// watchDeadline has the belief end at its deadline. That takes a timer only when the renewals
// begin, well before the deadline, or when they end.
func (h *Handle) watchDeadline() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.expiry == nil && h.granted && !h.over {
		h.expiry = time.AfterFunc(time.Until(h.deadline), h.expire)
	}
}

// holdLocally begins the life of a lock that this process alone knows of.
func (h *Handle) holdLocally(ctx context.Context) {
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
}

// sureUntil returns how long a grant is surely ours that was asked for at t0.
func (h *Handle) sureUntil(grant Grant, t0 time.Time) time.Time {
	sure := min(h.claim.Lease, grant.TTL)
	return t0.Add(sure - sure/clockDrift - margin)
}

// prolong moves the deadline. It is false if the lock is over: a renewal never revives a
// belief that has died.
func (h *Handle) prolong(grant Grant, t0 time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over || !time.Now().Before(h.deadline) {
		return false
	}
	if until := h.sureUntil(grant, t0); until.After(h.deadline) {
		h.deadline = until
		h.expiry.Reset(time.Until(until))
	}
	return true
}

// expire is called when the deadline is near or past.
func (h *Handle) expire() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if left := time.Until(h.deadline); left > 0 {
		h.expiry.Reset(left) // prolonged while the timer was firing
		return
	}
	h.loseLocked(&LostError{Why: Expired})
}

func (h *Handle) lose(err *LostError) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.loseLocked(err)
}

// loseLocked lets the next one here ask, too: a holder that does not stop must not block its name
// for longer here than on other machines. The Store says when the next one may have the lock;
// where there is no Store to ask, see OrLocal, the next one waits for the holder.
func (h *Handle) loseLocked(err *LostError) {
	if h.cancel == nil {
		h.over = true // its life has not begun, and must not begin by the grant that is lost
	}
	if !h.over {
		h.over = true
		h.lost = true
		h.cancel(err)
		h.locker.lines.lose(h)
	}
}

// Context returns a context with the values of the one given to Acquire. It ends when the
// lock is released (its cause is [ErrReleased] then) or lost (a [*LostError]): before anybody
// else can have the lock, as long as this process runs. It does not end with the context
// given to Acquire. The lock is renewed until then.
func (h *Handle) Context() context.Context { return h.ctx }

// Fence returns the lock's fencing token: larger than that of every earlier holder of the
// same name. It is 0 if the lock is [Handle.Local], or the Store has none ([NewQuorum]).
func (h *Handle) Fence() int64 { return h.fence }

// Deadline returns the time at which the lock is lost unless it is renewed before. It is zero
// if the lock is [Handle.Local].
func (h *Handle) Deadline() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.deadline
}

// Local is true if the lock was taken inside this process only, see [OrLocal].
func (h *Handle) Local() bool { return !h.granted }

// StopRenewing lets the lock run out: it is lost at its [Handle.Deadline] unless it is released
// before.
func (h *Handle) StopRenewing() {
	h.watchDeadline()
	h.owner.join()
}

// Done says that the caller's delivery, see [Dedupe], was handled well: from Release on it counts as
// handled for window, to the millisecond; also if the lock was lost meanwhile. Without it the delivery may
// be tried again, as after a release that does not reach the Store. Call it before Release. It is for nothing if the
// lock is [Handle.Local], or is for no delivery.
func (h *Handle) Done(window time.Duration) { h.done = window }

// Release gives the lock back, or hands it over to the first in line. It returns
//
//   - nil;
//   - a [*LostError] if the lock had been lost before, so that somebody else may have run at
//     the same time;
//   - an [*UnavailableError] if the Store does not answer until the deadline of ctx or the
//     Locker's OpTimeout has passed. Release goes on in the background then, until there is an answer or
//     the lease has passed.
//
// Give it a context that does not end with the work the lock was for. Further calls return
// what the first one returned.
func (h *Handle) Release(ctx context.Context) error {
	h.release.Do(func() {
		h.end()
		h.claim.Done = h.done
		if lost, ok := errors.AsType[*LostError](context.Cause(h.ctx)); ok {
			h.released = lost
		}
		if err := h.giveBack(ctx); h.released == nil {
			h.released = err
		}
	})
	return h.released
}

// end ends the handle's life, if it has begun, and joins its owner.
func (h *Handle) end() {
	if h.ctx == nil {
		return
	}
	h.owner.join()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.granted {
		if h.expiry != nil {
			h.expiry.Stop()
		}
		if !time.Now().Before(h.deadline) {
			h.loseLocked(&LostError{Why: Expired}) // the timer is late
		}
	}
	h.over = true
	h.cancel(ErrReleased)
}

// giveBack gives the lock to the next one, by the Store if that has it.
func (h *Handle) giveBack(ctx context.Context) error {
	l := h.locker
	defer l.lines.leave(h.key)
	if h.lost {
		defer l.lines.stopped(h)
	}
	if !h.granted {
		if h.doubtful {
			h.leaveBehind()
		}
		l.lines.pass(h.key, h.claim.Token, Successor{}, time.Time{}, false, l.outages.of(h.key).current() != nil)
		return nil
	}
	return h.releaseOrLeave(ctx)
}

// releaseOrLeave releases the handle's token, which goes on in the background if there is no
// answer.
func (h *Handle) releaseOrLeave(ctx context.Context) error {
	err := h.locker.releaseOnce(ctx, h.key, h.claim)
	switch {
	case !answered(err):
		h.leaveBehind()
		h.locker.lines.pass(h.key, h.claim.Token, Successor{}, time.Time{}, false, true)
	case h.granted && h.doubtful:
		h.leaveBehind() // an attempt without an answer may come yet
	}
	return err
}
