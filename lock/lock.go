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
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Defaults of a [Locker] and of its Acquire.
const (
	DefaultPrefix    = "lock."
	DefaultLease     = 30 * time.Second
	DefaultQueue     = 64
	DefaultOpTimeout = 2 * time.Second
)

// Options configure a [Locker]. The zero value is ready for use.
type Options struct {
	// OpTimeout bounds one operation on the Store, connecting included; 2s if zero.
	// Without an answer by then the Store counts as unavailable.
	OpTimeout time.Duration

	// OnOutage, if set, is called with the reason when the Store becomes unavailable, once per
	// outage (of a server, in a cluster), and OnRecovery when it answers again, with how long it
	// was away. They must not use the Locker.
	OnOutage   func(error)
	OnRecovery func(time.Duration)

	// OnDeaf, if set, is called with the reason when the Store answers but does not tell of
	// hand-overs, once until it does. The first in each line asks up to 100 times a second then.
	OnDeaf func(error)
}

// A Locker takes locks in one [Store]. Callers of one process should share a Locker: when they
// wait for the same lock, one of them asks for all then.
type Locker struct {
	store     Store
	process   Process
	opTimeout time.Duration
	lines     *lines
	leftovers leftovers
	outages   *outages

	listen sync.Once
	hears  atomic.Bool // the Store tells of hand-overs
	deaf   bool        // it does not, and that was said
	onDeaf func(error)
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
	if o.OnDeaf == nil {
		o.OnDeaf = func(error) {}
	}
	l := &Locker{
		store:     store,
		process:   NewProcess(),
		opTimeout: o.OpTimeout,
		lines:     newLines(),
		leftovers: leftovers{byKey: make(map[string][]Claim)},
		onDeaf:    o.OnDeaf,
	}
	l.outages = newOutages(store, func(err error) {
		o.OnOutage(err)
		l.lines.renewAll() // who takes over may lack them: their holders must not be the last to know
	}, func(away time.Duration) {
		o.OnRecovery(away)
		l.lines.renewAll()
		l.lines.nudgeAll()
	})
	return l
}

// hear has the Store tell of hand-overs from now on. Those who wait ask once more then: one may
// have come to pass before.
func (l *Locker) hear() {
	l.store.Listen(l.process, Listener{
		Handed: l.lines.handed,
		Listening: func(on bool, err error) {
			l.hears.Store(on)
			if on {
				l.deaf = false
				l.lines.renewAll() // the last one broke: what is there may be another server
			} else if err != nil && !l.deaf {
				l.deaf = true
				l.onDeaf(err)
			}
			l.lines.nudgeAll()
		},
	})
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

// Dedupe says that the lock is for handling a delivery, any string: what its sender calls it, say. While
// the Store knows it as handled, see [Handle.Done], Acquire fails with [ErrDone], whoever has the lock.
// While another caller handles the same delivery, the reason of its refusal is [SameDelivery]. Deliveries
// belong to a name: another name has others. With the empty string, as by default, and for a lock that is
// [Handle.Local], there is none of that. [NewQuorum] cannot do it.
func Dedupe(delivery string) AcquireOption { return func(r *request) { r.delivery = delivery } }

// Supersede lets the newest win: the caller, once it waits, takes the place of all who came before it, wait,
// and said so, too, in whichever process; their Acquire fails with [ErrSuperseded]. It never ends one that
// holds the lock. If the caller does not get the lock in the end, its error is a [*NewestError].
// [NewQuorum] cannot do it.
func Supersede() AcquireOption { return func(r *request) { r.supersedes = true } }

type request struct {
	prefix     string
	lease      time.Duration
	wait       time.Duration
	queue      int
	orLocal    bool
	delivery   string
	supersedes bool
}

// token returns a new one that says what others must know.
func (r *request) token(p Process) Token {
	token := p.NewToken()
	if r.delivery != "" {
		token = token.Handling(r.delivery)
	}
	if r.supersedes {
		token = token.Superseding()
	}
	return token
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
//   - [ErrDone], [ErrSuperseded]: there is nothing to do any more, see [Dedupe] and [Supersede];
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
	if _, ok := l.store.(*quorum); ok && (r.delivery != "" || r.supersedes) {
		return nil, errors.New("a quorum has no line and no deliveries: Supersede and Dedupe take one server, a master with replicas, or a cluster")
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}

	a := &acquisition{
		ctx:     ctx,
		locker:  l,
		request: r,
		handle:  &Handle{locker: l, key: Key(r.prefix, name), claim: Claim{Token: r.token(l.process), Lease: r.lease}},
		arrived: time.Now(),
	}
	return a.run()
}

// until is a context with a deadline of its own. Other than that of context.WithDeadline it has
// no timer, which costs more than the rest of an operation: whoever waits has one, as
// connections do.
type until struct {
	context.Context
	deadline time.Time
}

func (c until) Deadline() (time.Time, bool) { return c.deadline, true }

// operation bounds one operation on the Store. It is not cut short when ctx ends: an answer that
// nobody waits for would leave a lock behind.
func (l *Locker) operation(ctx context.Context) until {
	return until{context.WithoutCancel(ctx), time.Now().Add(l.opTimeout)}
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
