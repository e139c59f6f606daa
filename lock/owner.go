package lock

import (
	"context"
	"errors"
	"sync"
	"time"
)

// A lock is renewed a third of its lease after the last renewal was sent, so that two may
// fail; and every maxRenewal, so that a holder soon learns of it if the Store has lost its lock.
// Times are rounded down to a common beat: renewals that fall due close together are sent
// together. One that failed is repeated a beat later.
const (
	renewalsPerLease = 3
	maxRenewal       = 10 * time.Second
	beatsPerRenewal  = 10
)

// An owner renews one lock. It is a timer until the first renewal is due, which most locks do
// not live to see, and a goroutine from then on.
type owner struct {
	timer   *time.Timer
	once    sync.Once
	running sync.WaitGroup

	mu      sync.Mutex
	stopped bool
	stop    context.CancelFunc // of the goroutine; nil: there is none
	hurry   chan struct{}      // likewise; has an element after hurryUp
}

// start has h renewed, whose lock was granted to a question asked at t0. The grant may be shorter
// than the lease: it may be the answer to an older question.
func (o *owner) start(h *Handle, grant Grant, t0 time.Time) {
	o.running.Add(1)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.timer = time.AfterFunc(untilRenewal(min(h.claim.Lease, grant.TTL), t0), func() {
		defer o.running.Done()
		h.watchDeadline()
		ctx, stop := context.WithCancel(h.ctx) // a lost lock needs no renewal
		defer stop()
		if o.begin(stop) {
			h.keepRenewing(ctx)
		}
	})
}

func (o *owner) begin(stop context.CancelFunc) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stop = stop
	o.hurry = make(chan struct{}, 1)
	return !o.stopped
}

// join ends the renewing, and returns when nothing of it is under way any more.
func (o *owner) join() {
	if o.timer == nil {
		return // a local lock
	}
	o.once.Do(func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.stopped = true
		if o.timer.Stop() {
			o.running.Done() // it never began
			return
		}
		if o.stop != nil {
			o.stop()
		}
	})
	o.running.Wait()
}

// hurryUp has the lock renewed at once: the Store was away, and may have lost it.
func (o *owner) hurryUp() {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.stopped || o.timer == nil:
	case o.timer.Stop():
		o.timer.Reset(0)
	case o.hurry != nil:
		select {
		case o.hurry <- struct{}{}:
		default:
		}
	}
}

func period(lease time.Duration) time.Duration { return min(lease/renewalsPerLease, maxRenewal) }

func beat(lease time.Duration) time.Duration { return period(lease) / beatsPerRenewal }

func untilRenewal(lease time.Duration, t0 time.Time) time.Duration {
	due := t0.Add(period(lease))
	early := due.Sub(due.Truncate(beat(lease)))
	return time.Until(due) - early
}

// keepRenewing renews until ctx ends or the lock is lost. While the Store is away it tries on:
// it is the deadline, and not a failed renewal, that ends a lock.
func (h *Handle) keepRenewing(ctx context.Context) {
	for {
		t0 := time.Now()
		grant, err := h.renewOnce(ctx)
		pause := untilRenewal(h.claim.Lease, t0)
		switch lost, ok := errors.AsType[*LostError](err); {
		case ctx.Err() != nil:
			return
		case ok:
			h.lose(lost)
			return
		case err != nil:
			pause = beat(h.claim.Lease)
		case !h.prolong(grant, t0):
			return
		}
		select {
		case <-time.After(pause):
		case <-h.owner.hurry:
			// At most once a beat: a Store that comes and goes would have it renewed for ever.
			select {
			case <-time.After(time.Until(t0.Add(beat(h.claim.Lease)))):
			case <-ctx.Done():
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// renewOnce leaves time to try again before the deadline.
func (h *Handle) renewOnce(ctx context.Context) (Grant, error) {
	op, cancel := context.WithTimeout(ctx, min(h.locker.opTimeout, h.claim.Lease/renewalsPerLease))
	defer cancel()
	grant, err := h.locker.store.Renew(op, h.key, h.claim)
	hasty := errors.Is(err, context.DeadlineExceeded) && h.claim.Lease/renewalsPerLease < h.locker.opTimeout
	if ctx.Err() == nil && !hasty { // otherwise nobody waited for the answer, or not for long enough
		h.locker.outages.report(h.key, err)
	}
	return grant, err
}
