package lock

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// While the Store is away, a leftover's release is repeated after minRelease, doubled with
// each failure up to maxRelease.
const (
	minRelease = 50 * time.Millisecond
	maxRelease = time.Second
)

// leftovers are the claims that the Store may still have although nobody makes them: of an
// attempt or a release that went unanswered. Each is released in the background until the
// Store answers or its lease has passed. Whoever asks for the same key meanwhile releases it
// first, or it would meet this process's own lock and take it for contention.
type leftovers struct {
	mu    sync.Mutex
	byKey map[string][]Claim
}

func (o *leftovers) of(key string) []Claim {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.byKey[key])
}

func (o *leftovers) add(key string, claim Claim) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.byKey[key] = append(o.byKey[key], claim)
}

func (o *leftovers) remove(key string, claim Claim) {
	o.mu.Lock()
	defer o.mu.Unlock()
	rest := slices.DeleteFunc(o.byKey[key], func(c Claim) bool { return c.Token == claim.Token })
	if len(rest) == 0 {
		delete(o.byKey, key)
	} else {
		o.byKey[key] = rest
	}
}

// leaveBehind releases the handle's token in the background. It must be called before the lines
// hear that the handle is done.
func (h *Handle) leaveBehind() {
	l := h.locker
	l.leftovers.add(h.key, h.claim)
	l.lines.retain()
	go func() {
		defer l.lines.done()
		defer l.leftovers.remove(h.key, h.claim)
		// The key counts whole seconds and one more: a lock can last 2s beyond its lease.
		runsOut := time.Now().Add(h.claim.Lease + 2*time.Second)
		overtaken := h.granted && !h.doubtful
		for pause := minRelease; time.Now().Before(runsOut); pause = min(2*pause, maxRelease) {
			err := l.releaseOnce(context.Background(), h.key, h.claim)
			if answered(err) {
				if !errors.Is(err, ErrLost) || overtaken {
					return
				}
				// Not there. But the attempt may be slower than its release: look once more.
				overtaken = true
				pause = l.opTimeout
			}
			time.Sleep(pause)
		}
	}()
}

// clearLeftovers releases what is left over of key, so that it is not in the way. Its error is
// an *UnavailableError.
func (l *Locker) clearLeftovers(ctx context.Context, key string) error {
	for _, claim := range l.leftovers.of(key) {
		if err := l.releaseOnce(ctx, key, claim); !answered(err) {
			return err
		}
		l.leftovers.remove(key, claim)
	}
	return nil
}

// releaseOnce tells the lines, too, if there is an answer.
func (l *Locker) releaseOnce(ctx context.Context, key string, claim Claim) error {
	op := l.operation(ctx)
	if deadline, ok := ctx.Deadline(); ok && deadline.Before(op.deadline) {
		op.deadline = deadline
	}
	t0 := time.Now()
	next, err := l.store.Release(op, key, claim)
	if !errors.Is(err, ErrLost) { // a replica, and a server that is full, can say that, too
		l.outages.report(key, err)
	}
	if answered(err) {
		l.lines.pass(key, claim.Token, next, t0, err == nil, false)
	}
	return err
}

// answered is true if a release reached the Store: whatever it said, the token is gone.
func answered(err error) bool { return !errors.Is(err, ErrUnavailable) }
