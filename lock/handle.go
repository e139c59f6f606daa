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
	turn   *turn
	key    string
	token  Token
	lease  time.Duration

	granted  bool // the Store said yes
	doubtful bool // an attempt went unanswered, so the Store may have the token all the same

	ctx      context.Context
	cancel   context.CancelCauseFunc
	stop     context.CancelFunc // frees the deadline's timer
	deadline time.Time
	fence    int64
	waited   time.Duration

	release  sync.Once
	released error
}

// hold begins the life of a lock that was granted to an attempt begun at t0.
func (h *Handle) hold(ctx context.Context, grant Grant, t0 time.Time) {
	sure := min(h.lease, grant.TTL)
	h.granted = true
	h.fence = grant.Fence
	h.deadline = t0.Add(sure - sure/clockDrift - margin)
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	h.ctx, h.stop = context.WithDeadlineCause(h.ctx, h.deadline, &LostError{Why: Expired})
}

// holdLocally begins the life of a lock that this process alone knows of.
func (h *Handle) holdLocally(ctx context.Context) {
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	h.stop = func() {}
}

// Context returns a context with the values of the one given to Acquire. It ends when the
// lock is released (its cause is [ErrReleased] then) or lost (a [*LostError]): before anybody
// else can have the lock, as long as this process runs. It does not end with the context
// given to Acquire.
func (h *Handle) Context() context.Context { return h.ctx }

// Fence returns the lock's fencing token: larger than that of every earlier holder of the
// same name. It is 0 if the lock is [Handle.Local].
func (h *Handle) Fence() int64 { return h.fence }

// Deadline returns the time at which the lock is lost. It is zero if the lock is
// [Handle.Local].
func (h *Handle) Deadline() time.Time { return h.deadline }

// Waited returns how long Acquire took.
func (h *Handle) Waited() time.Duration { return h.waited }

// Local is true if the lock was taken inside this process only, see [OrLocal].
func (h *Handle) Local() bool { return !h.granted }

// Release gives the lock back, and the line's turn to the next in this process. It returns
//
//   - nil;
//   - a [*LostError] if the lock had been lost before, so that somebody else may have run at
//     the same time;
//   - an [*UnavailableError] if the Store does not answer until ctx ends or the Locker's
//     OpTimeout has passed. Release goes on in the background then, until there is an answer or
//     the lease has passed.
//
// Give it a context that does not end with the work the lock was for. Further calls return
// what the first one returned.
func (h *Handle) Release(ctx context.Context) error {
	h.release.Do(func() {
		if lost, ok := errors.AsType[*LostError](context.Cause(h.ctx)); ok {
			h.released = lost
		}
		h.end()
		err := h.giveBack(ctx)
		if h.released == nil && h.granted {
			h.released = err
		}
	})
	return h.released
}

// end ends the handle's context, if it has begun.
func (h *Handle) end() {
	if h.ctx != nil {
		h.cancel(ErrReleased)
		h.stop()
	}
}

// giveBack releases the lock in the Store, if it may be there, and passes the turn on.
func (h *Handle) giveBack(ctx context.Context) error {
	defer h.turn.pass()
	if !h.granted && !h.doubtful {
		return nil
	}
	err := h.locker.releaseOnce(ctx, h.key, h.token)
	if !answered(err) {
		h.locker.leaveBehind(h.key, h.token, h.lease)
	}
	return err
}

// giveUp takes an Acquire that failed back. Its caller has waited long enough for a Store
// that does not answer.
func (h *Handle) giveUp() {
	h.end()
	if h.granted {
		_ = h.giveBack(context.Background()) // the caller hears why Acquire failed
		return
	}
	if h.doubtful {
		h.locker.leaveBehind(h.key, h.token, h.lease)
	}
	h.turn.pass()
}
