// Package lock takes named locks that live in Redis (or in this process), lets callers
// wait for them in line, and tells a holder when its lock is no longer surely its own.
//
//	l := lock.New(lock.NewGetSet(client), lock.Options{})
//	h, err := l.Acquire(ctx, "deploy", lock.Wait(5*time.Second))
//	if err != nil {
//		return err // errors.Is(err, lock.ErrTimeout): somebody else had it for 5 seconds
//	}
//	defer h.Release(context.WithoutCancel(ctx))
//	return deploy(h.Context()) // ends when the lock is lost
//
// A [Store] is where locks live, and by which protocol; a [Locker] is what programs use.
package lock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Defaults of a [Locker] and of its Acquire.
const (
	DefaultPrefix    = "lock."
	DefaultLease     = 30 * time.Second
	DefaultQueue     = 64
	DefaultOpTimeout = 2 * time.Second
)

// While somebody else has the lock, the first in line asks again after a random part of
// minPoll, doubled with each refusal up to maxPoll.
const (
	minPoll = 4 * time.Millisecond
	maxPoll = 64 * time.Millisecond
)

// Options configure a [Locker]. The zero value is ready for use.
type Options struct {
	// OpTimeout bounds one operation on the Store, connecting included; 2s if zero.
	// Without an answer by then the Store counts as unavailable.
	OpTimeout time.Duration

	// OnOutage, if set, is called with the reason when the Store becomes unavailable, once per
	// outage, and OnRecovery when it answers again, with how long it was away. They must not
	// use the Locker.
	OnOutage   func(error)
	OnRecovery func(time.Duration)
}

// A Locker takes locks in one [Store]. Callers of one process should share a Locker: they
// stand in one line per lock then, first come first served, and only the first of each
// line asks the Store.
type Locker struct {
	store     Store
	opTimeout time.Duration
	lines     *lines
	leftovers leftovers
	outage    outage
}

// New returns a Locker over store, which it closes when it is closed itself.
func New(store Store, o Options) *Locker {
	if o.OpTimeout <= 0 {
		o.OpTimeout = DefaultOpTimeout
	}
	if o.OnOutage == nil {
		o.OnOutage = func(error) {}
	}
	if o.OnRecovery == nil {
		o.OnRecovery = func(time.Duration) {}
	}
	return &Locker{
		store:     store,
		opTimeout: o.OpTimeout,
		lines:     newLines(),
		leftovers: leftovers{byKey: make(map[string][]Token)},
		outage:    outage{onOutage: o.OnOutage, onRecovery: o.OnRecovery},
	}
}

// An AcquireOption says how [Locker.Acquire] takes a lock.
type AcquireOption func(*request)

// Prefix begins the lock's key in the Store; "lock." by default. See [CheckPrefix].
func Prefix(prefix string) AcquireOption { return func(r *request) { r.prefix = prefix } }

// Lease is how long the lock outlives its holder's death; 30s by default. Callers of one
// name may use different leases. See [CheckLease].
func Lease(lease time.Duration) AcquireOption { return func(r *request) { r.lease = lease } }

// Wait lets the caller wait in line for this long while somebody else has the lock. By
// default (0) it is refused at once.
func Wait(wait time.Duration) AcquireOption { return func(r *request) { r.wait = wait } }

// Queue is how many callers may wait for one lock in this process, 64 by default. One more
// gets [ErrLineFull] at once.
func Queue(n int) AcquireOption { return func(r *request) { r.queue = n } }

// OrLocal takes the lock inside this process only when the Store is unavailable, instead
// of failing with [ErrUnavailable]: exclusion among the callers of this Locker goes on,
// with other processes it does not. [Handle.Local] tells.
func OrLocal() AcquireOption { return func(r *request) { r.orLocal = true } }

type request struct {
	prefix  string
	lease   time.Duration
	wait    time.Duration
	queue   int
	orLocal bool
}

// CheckLease returns an error unless lease is a whole number of seconds from 1s to 24h: the
// key in Redis counts seconds.
func CheckLease(lease time.Duration) error {
	if lease < time.Second || lease > 24*time.Hour || lease%time.Second != 0 {
		return fmt.Errorf("%v is not a whole number of seconds from 1s to 24h", lease)
	}
	return nil
}

// CheckPrefix returns an error if prefix is empty, or has braces or control characters:
// keys with braces would end up on the wrong node of a Redis Cluster.
func CheckPrefix(prefix string) error {
	if prefix == "" {
		return errors.New("empty: give the keys a beginning of their own, such as lock.")
	}
	if strings.ContainsFunc(prefix, func(c rune) bool { return c == '{' || c == '}' || c < 0x20 || c == 0x7f }) {
		return fmt.Errorf("%q has braces or control characters, which a key must not have", prefix)
	}
	return nil
}

// Acquire takes the lock called name, any string. It returns a handle whose context ends
// when the lock is lost or released, or one of
//
//   - [ErrHeld], [ErrTimeout], [ErrLineFull]: contention;
//   - [ErrUnavailable]: the Store cannot be asked. A caller that already stands in line keeps
//     its place until its wait ends;
//   - the cause of ctx, if ctx ended first.
//
// An attempt without an answer is taken back in the background, so that it never leaves a
// lock behind. ctx bounds waiting and asking, and gives the handle its values; its end does
// not end a lock that was taken.
func (l *Locker) Acquire(ctx context.Context, name string, options ...AcquireOption) (*Handle, error) {
	r := request{prefix: DefaultPrefix, lease: DefaultLease, queue: DefaultQueue}
	for _, option := range options {
		option(&r)
	}
	if err := CheckLease(r.lease); err != nil {
		return nil, fmt.Errorf("lease: %w", err)
	}
	if err := CheckPrefix(r.prefix); err != nil {
		return nil, fmt.Errorf("prefix: %w", err)
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}

	h := &Handle{locker: l, key: Key(r.prefix, name), token: NewToken(), lease: r.lease}
	arrived := time.Now()
	turn, queued, err := l.lines.join(ctx, h.key, r.wait, r.queue)
	if err != nil {
		return nil, err
	}
	h.turn = turn
	l.lines.retain() // until giveBack
	taken := false
	defer func() {
		if !taken {
			h.giveUp()
		}
	}()
	if err := l.ask(ctx, h, r, arrived, queued); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx) // it left while the Store was answering
	}
	taken = true
	return h, nil
}

// ask asks the Store for the lock until it is granted, or there is a reason to stop asking.
// Every attempt has the same token: one that went unanswered is asked again by that.
func (l *Locker) ask(ctx context.Context, h *Handle, r request, arrived time.Time, inLine bool) error {
	for poll := minPoll; ; poll = min(2*poll, maxPoll) {
		err := l.attempt(ctx, h, inLine)
		away := errors.Is(err, ErrUnavailable)
		if away && r.orLocal {
			if l.lines.lingers(h.key) {
				away, err = false, &HeldError{Why: Held}
			} else {
				h.holdLocally(ctx)
				err = nil
			}
		}
		if err == nil {
			h.turn.settle(&HeldError{Why: Held}, false)
			return nil
		}
		remaining := r.wait - time.Since(arrived)
		patient := remaining > 0 && (inLine || !away)
		h.turn.settle(err, patient && r.queue > 0)
		held, _ := errors.AsType[*HeldError](err)
		switch {
		case patient && (inLine || r.queue > 0):
		case away || r.wait <= 0:
			return err
		case remaining <= 0:
			return &TimeoutError{Why: held.Why}
		default:
			return ErrLineFull
		}
		inLine = true
		select {
		case <-time.After(min(remaining, time.Millisecond+rand.N(poll))):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// attempt asks once. It is not cut short when ctx ends: an answer that nobody waits for
// would leave a lock behind.
func (l *Locker) attempt(ctx context.Context, h *Handle, inLine bool) error {
	op, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.opTimeout)
	defer cancel()
	if !inLine {
		done, err := l.outage.admit(op)
		if err != nil {
			return err
		}
		defer done()
	}
	if err := l.clearLeftovers(op, h.key); err != nil {
		return err
	}
	t0 := time.Now() // before asking: the grant may be older than its answer
	grant, err := l.store.Acquire(op, h.key, h.token, h.lease)
	l.outage.report(err)
	if err == nil && !h.hold(ctx, grant, t0) {
		err = &UnavailableError{Doubtful: true, Err: errors.New("the answer came after the lease had passed")}
	}
	if away, ok := errors.AsType[*UnavailableError](err); ok && away.Doubtful {
		h.doubtful = true
	}
	return err
}

// Close closes the Store as soon as no lock is held and nobody waits for one. It returns
// then with the Store's error, or with the cause of ctx if ctx ends first; the Store is closed
// all the same. Acquire fails from now on with [ErrUnavailable].
func (l *Locker) Close(ctx context.Context) error {
	idle := l.lines.close(l.store.Close)
	select {
	case <-idle:
		return l.lines.closeErr
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
