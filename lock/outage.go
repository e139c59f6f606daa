package lock

import (
	"context"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"
)

// outages are those of a Store's shards.
type outages struct {
	store Store
	only  outage // of the one shard, which is most Stores'

	away atomic.Int32 // how many shards are

	mu      sync.Mutex
	byShard map[string]*outage
}

func newOutages(store Store, onOutage func(error), onRecovery func(time.Duration)) *outages {
	o := &outages{store: store, byShard: make(map[string]*outage)}
	o.only = outage{
		onOutage: func(err error) {
			o.away.Add(1)
			onOutage(err)
		},
		onRecovery: func(away time.Duration) {
			o.away.Add(-1)
			onRecovery(away)
		},
	}
	return o
}

// of returns the state of the shard that has key.
func (o *outages) of(key string) *outage {
	shard := o.store.Shard(key)
	if shard == "" {
		return &o.only
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byShard[shard] == nil {
		o.byShard[shard] = &outage{onOutage: o.only.onOutage, onRecovery: o.only.onRecovery}
	}
	return o.byShard[shard]
}

// report learns from the outcome of every operation. Any answer of the Store ends an outage; also
// that of a shard which is no more: another one has its keys by now.
func (o *outages) report(key string, err error) {
	o.of(key).report(key, err)
	if o.away.Load() == 0 || errors.Is(err, ErrUnavailable) {
		return
	}
	o.mu.Lock()
	all := maps.Clone(o.byShard)
	o.mu.Unlock()
	all[""] = &o.only
	for shard, outage := range all {
		if key := outage.concerns(); key != "" {
			if now := o.store.Shard(key); now != "" && now != shard {
				outage.report(key, nil)
			}
		}
	}
}

// An outage is found once and shared: while a shard is away, one newcomer at a time asks it,
// and the others hear what that one found out, instead of a time-out each.
type outage struct {
	onOutage   func(error)
	onRecovery func(time.Duration)

	away atomic.Bool // written under mu

	mu    sync.Mutex
	since time.Time
	key   string // that was asked for when it was found
	err   error
	probe chan struct{} // closed when the one who asks has its answer; nil: nobody asks
}

// admit returns nil to a newcomer who may ask, and otherwise why not. Whoever is admitted calls
// done after that.
func (o *outage) admit(ctx context.Context) (done func(), err error) {
	for o.away.Load() {
		o.mu.Lock()
		probe := o.probe
		if probe == nil && o.away.Load() {
			mine := make(chan struct{})
			o.probe = mine
			o.mu.Unlock()
			return func() { o.endProbe(mine) }, nil
		}
		o.mu.Unlock()
		if probe == nil {
			break
		}
		deadline, _ := ctx.Deadline()
		select {
		case <-probe:
		case <-time.After(time.Until(deadline)):
			return nil, &UnavailableError{Err: context.DeadlineExceeded}
		}
		o.mu.Lock()
		err := o.err
		o.mu.Unlock()
		if err != nil {
			return nil, err
		}
	}
	return func() {}, nil
}

func (o *outage) endProbe(mine chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.probe = nil
	close(mine)
}

// asked returns why the Store is away if somebody is about to find out whether it still is; and
// otherwise nil.
func (o *outage) asked() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.probe == nil {
		return nil
	}
	return o.err
}

// current returns why the Store is away, as far as is known; nil if it is not.
func (o *outage) current() error {
	if !o.away.Load() {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// concerns returns a key of the shard that is away; empty if it is not.
func (o *outage) concerns() string {
	if !o.away.Load() {
		return ""
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.key
}

func (o *outage) report(key string, err error) {
	unavailable, failed := errors.AsType[*UnavailableError](err)
	failed = failed && !unavailable.ThisKey
	if failed && errors.Is(err, context.Canceled) || !failed && !o.away.Load() {
		return // nobody waited for the answer; or all is well, as ever
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch was := o.away.Load(); {
	case failed:
		// The next one's operation was not this one: it is not in doubt.
		o.err = &UnavailableError{Err: unavailable.Err}
		if !was {
			o.since, o.key = time.Now(), key
			o.away.Store(true)
			o.onOutage(err)
		}
	case was:
		o.err = nil
		o.away.Store(false)
		o.onRecovery(time.Since(o.since))
	}
}
