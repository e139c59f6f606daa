package lock

import (
	"context"
	"sync"
	"time"
)

// memory is a Store inside this process. Its clock is the process's monotonic one.
type memory struct {
	mu    sync.Mutex
	locks map[string]memoryLock
	fence int64 // the last one given out, of any key
}

type memoryLock struct {
	token Token
	ends  time.Time
	fence int64
}

// NewMemory returns a Store whose locks live inside this process and end with it. It never
// is unavailable.
func NewMemory() Store { return &memory{locks: make(map[string]memoryLock)} }

func (m *memory) Acquire(_ context.Context, key string, token Token, lease time.Duration) (Grant, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	held, ok := m.locks[key]
	live := ok && now.Before(held.ends)
	if live && held.token != token {
		return Grant{}, &HeldError{Why: Held, For: held.ends.Sub(now)}
	}
	if !live {
		// Microseconds keep the fence growing across a restart of the process.
		m.fence = max(m.fence+1, now.UnixMicro())
		held = memoryLock{token: token, ends: now.Add(lease), fence: m.fence}
		m.locks[key] = held
	}
	return Grant{Fence: held.fence, TTL: held.ends.Sub(now)}, nil
}

func (m *memory) Renew(_ context.Context, key string, token Token, lease time.Duration) (Grant, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	held, err := m.own(key, token, now)
	if err != nil {
		return Grant{}, err
	}
	if ends := now.Add(lease); ends.After(held.ends) {
		held.ends = ends
		m.locks[key] = held
	}
	return Grant{Fence: held.fence, TTL: held.ends.Sub(now)}, nil
}

func (m *memory) Release(_ context.Context, key string, token Token) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	held, err := m.own(key, token, time.Now())
	if held.token == token {
		delete(m.locks, key)
	}
	return err
}

// own returns the lock of key, and an error unless it is token's and alive.
func (m *memory) own(key string, token Token, now time.Time) (memoryLock, error) {
	held, ok := m.locks[key]
	switch {
	case !ok || held.token != token:
		return held, &LostError{Why: NotOwner}
	case !now.Before(held.ends):
		return held, &LostError{Why: Expired}
	}
	return held, nil
}

func (m *memory) Inspect(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if held, ok := m.locks[key]; ok && now.Before(held.ends) {
		return &HeldError{Why: Held, For: held.ends.Sub(now)}
	}
	return nil
}

func (m *memory) ForceRelease(_ context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.locks, key)
	return nil
}

func (m *memory) Close() error { return nil }
