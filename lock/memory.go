package lock

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"
)

// memory is a Store inside this process. Its clock is the process's monotonic one, and nobody
// in line is ever taken for dead.
type memory struct {
	mu        sync.Mutex
	locks     map[string]memoryLock
	listeners map[Process]Listener
	fence     int64 // the last one given out, of any key
	place     int64 // likewise
}

type memoryLock struct {
	token Token
	ends  time.Time
	fence int64
	line  []Claim // by place
}

// NewMemory returns a Store whose locks live inside this process and end with it. It never
// is unavailable.
func NewMemory() Store {
	return &memory{locks: make(map[string]memoryLock), listeners: make(map[Process]Listener)}
}

func (m *memory) Acquire(_ context.Context, key string, claim Claim) (Grant, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	lock := m.locks[key]
	defer func() { m.put(key, lock) }()
	refusal := &HeldError{Why: Held}
	if claim.Wait && !(lock.token == claim.Token && lock.live(now)) {
		refusal.Place, refusal.NewPlace = m.lineUp(&lock, claim)
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
	if !lock.live(now) {
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

func (m *memory) Inspect(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if lock := m.locks[key]; lock.live(now) || len(lock.line) > 0 {
		return &HeldError{Why: Held, For: max(0, lock.ends.Sub(now)), Line: len(lock.line)}
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
	if listener, ok := m.listeners[first.Token.process()]; ok {
		listener.Handed(first.Token)
	}
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
