package lock

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"
)

// memory is a Store inside this process. Its clock is the process's monotonic one, and nobody
// in line is ever taken for dead.
type memory struct {
	mu        sync.Mutex
	locks     map[string]memoryLock
	done      map[string]time.Time // by key and delivery: until when it counts as handled
	doneKept  int                  // as many of them when the old ones were last removed
	listeners map[Process]Listener
	fence     int64 // the last one given out, of any key
	place     int64 // likewise
}

type memoryLock struct {
	token  Token
	ends   time.Time
	fence  int64
	line   []Claim // by place
	newest Claim   // the last one that superseded others
}

// NewMemory returns a Store whose locks live inside this process and end with it. It never
// is unavailable.
func NewMemory() Store {
	return &memory{locks: make(map[string]memoryLock), done: make(map[string]time.Time), listeners: make(map[Process]Listener)}
}

func (m *memory) Acquire(_ context.Context, key string, claim Claim) (Grant, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	lock := m.locks[key]
	defer func() { m.put(key, lock) }()
	if m.isDone(key, claim.Token, now) {
		return Grant{}, ErrDone
	}
	refusal := new(HeldError)
	if claim.Wait && !(lock.token == claim.Token && lock.live(now)) {
		if claim.Token.supersedes() {
			if claim.Since.IsZero() {
				claim.Since = now
			}
			if lock.hasNewer(claim, now) {
				return Grant{}, ErrSuperseded
			}
		}
		refusal.Place, refusal.NewPlace = m.lineUp(&lock, claim)
		claim.Place = refusal.Place
		if claim.Token.supersedes() && lock.why(claim.Token, now) != SameDelivery {
			m.supersede(&lock, claim)
		}
	}
	switch {
	case lock.live(now) || claim.LineUp:
	case len(lock.line) > 0:
		m.handOver(&lock, now)
	default:
		m.give(&lock, claim, now)
	}
	if lock.token == claim.Token && lock.live(now) {
		return lock.grant(now), nil
	}
	if refusal.Why = lock.why(claim.Token, now); !lock.live(now) {
		refusal.Why = Free
	}
	refusal.For, refusal.Line = max(0, lock.ends.Sub(now)), len(lock.line)
	return Grant{}, refusal
}

func (m *memory) Renew(_ context.Context, key string, claim Claim) (Grant, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	lock := m.locks[key]
	if err := lock.check(claim.Token, now); err != nil {
		return Grant{}, err
	}
	if ends := now.Add(claim.Lease); ends.After(lock.ends) {
		lock.ends = ends
		m.put(key, lock)
	}
	return lock.grant(now), nil
}

func (m *memory) Release(_ context.Context, key string, claim Claim) (Successor, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	lock := m.locks[key]
	defer func() { m.put(key, lock) }()
	lock.line = slices.DeleteFunc(lock.line, func(c Claim) bool { return c.Token == claim.Token })
	m.markDone(key, claim, now)
	err := lock.check(claim.Token, now)
	if lock.token == claim.Token {
		lock.token, lock.ends = "", time.Time{}
	}
	if err != nil || len(lock.line) == 0 {
		return Successor{}, err
	}
	m.handOver(&lock, now)
	return Successor{Token: lock.token, Grant: lock.grant(now)}, nil
}

func (m *memory) Inspect(_ context.Context, key string, token Token) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if m.isDone(key, token, now) {
		return ErrDone
	}
	if lock := m.locks[key]; lock.live(now) || len(lock.line) > 0 {
		return &HeldError{Why: lock.why(token, now), For: max(0, lock.ends.Sub(now)), Line: len(lock.line)}
	}
	return nil
}

func (m *memory) ForceRelease(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	lock := m.locks[key]
	lock.token, lock.ends = "", time.Time{}
	m.put(key, lock)
	return nil
}

func (m *memory) Shard(string) string { return "" }

func (m *memory) Listen(process Process, listener Listener) {
	m.mu.Lock()
	m.listeners[process] = listener
	m.mu.Unlock()
	listener.Listening(true, nil)
}

func (m *memory) Close() error { return nil }

// lineUp returns the claim's place, and whether it had none before.
func (m *memory) lineUp(lock *memoryLock, claim Claim) (place int64, added bool) {
	for _, c := range lock.line {
		if c.Token == claim.Token {
			return c.Place, false
		}
	}
	m.place++
	if claim.Place == 0 {
		claim.Place = m.place
	}
	i, _ := slices.BinarySearchFunc(lock.line, claim, func(a, b Claim) int { return cmp.Compare(a.Place, b.Place) })
	lock.line = slices.Insert(lock.line, i, claim)
	return claim.Place, true
}

// supersede takes the places of those that a newer one displaces.
func (m *memory) supersede(lock *memoryLock, claim Claim) {
	if lock.newest.Token == claim.Token {
		return
	}
	lock.newest = claim
	lock.line = slices.DeleteFunc(lock.line, func(c Claim) bool {
		displaced := c.Token.supersedes() && c.Token != claim.Token
		if displaced {
			m.tell(c.Token)
		}
		return displaced
	})
}

func (m *memory) tell(token Token) {
	if listener, ok := m.listeners[token.process()]; ok {
		listener.Handed(token)
	}
}

// markDone notes the delivery that a claim has handled. Old ones are removed whenever there are twice
// as many as were left the last time.
func (m *memory) markDone(key string, claim Claim, now time.Time) {
	delivery := claim.Token.delivery()
	if claim.Done <= 0 || delivery == "" {
		return
	}
	m.done[key+delivery] = now.Add(claim.Done)
	const few = 1000
	if len(m.done) > 2*m.doneKept+few {
		maps.DeleteFunc(m.done, func(_ string, until time.Time) bool { return !now.Before(until) })
		m.doneKept = len(m.done)
	}
}

func (m *memory) isDone(key string, token Token, now time.Time) bool {
	delivery := token.delivery() // of a fixed length
	return delivery != "" && now.Before(m.done[key+delivery])
}

func (m *memory) give(lock *memoryLock, claim Claim, now time.Time) {
	// Microseconds keep the fence growing across a restart of the process.
	m.fence = max(m.fence+1, now.UnixMicro())
	lock.token, lock.ends, lock.fence = claim.Token, now.Add(claim.Lease), m.fence
}

// handOver gives the lock to the first in line.
func (m *memory) handOver(lock *memoryLock, now time.Time) {
	first := lock.line[0]
	lock.line = slices.Delete(lock.line, 0, 1)
	m.give(lock, first, now)
	m.tell(first.Token)
}

// put forgets a lock that nobody holds or waits for.
func (m *memory) put(key string, lock memoryLock) {
	if lock.token == "" && len(lock.line) == 0 {
		delete(m.locks, key)
		return
	}
	m.locks[key] = lock
}

func (l *memoryLock) live(now time.Time) bool { return now.Before(l.ends) }

func (l *memoryLock) grant(now time.Time) Grant { return Grant{Fence: l.fence, TTL: l.ends.Sub(now)} }

// why returns the reason of a refusal.
func (l *memoryLock) why(token Token, now time.Time) Reason {
	if l.live(now) && token.sameDelivery(l.token) {
		return SameDelivery
	}
	return Held
}

// hasNewer is true if a claim that supersedes others is superseded itself: by one that came later,
// or, sent again while it is handled, by one that waits.
func (l *memoryLock) hasNewer(claim Claim, now time.Time) bool {
	if claim.Token == l.newest.Token {
		return false
	}
	if claim.Place != 0 {
		return claim.Place < l.newest.Place
	}
	return claim.Since.Before(l.newest.Since) || l.why(claim.Token, now) == SameDelivery &&
		slices.ContainsFunc(l.line, func(c Claim) bool { return c.Token.supersedes() })
}

// check returns an error unless the lock is token's and alive.
func (l *memoryLock) check(token Token, now time.Time) error {
	switch {
	case l.token == "" || l.token != token:
		return &LostError{Why: NotOwner}
	case !l.live(now):
		return &LostError{Why: Expired}
	}
	return nil
}
