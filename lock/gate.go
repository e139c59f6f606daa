package lock

import (
	"maps"
	"math/rand/v2"
	"sync"
	"time"
)

// gates let one caller at a time through for each key.
type gates struct {
	mu    sync.Mutex
	byKey map[string]*gate
}

type gate struct {
	turn  chan struct{} // has an element while somebody is inside
	users int
}

// enter is false if it was not the caller's turn until the deadline. Otherwise leave must follow.
func (g *gates) enter(op until, key string) bool {
	g.mu.Lock()
	at := g.byKey[key]
	if at == nil {
		at = &gate{turn: make(chan struct{}, 1)}
		g.byKey[key] = at
	}
	at.users++
	g.mu.Unlock()
	select {
	case at.turn <- struct{}{}:
		return true
	default:
	}
	patience := time.NewTimer(time.Until(op.deadline))
	defer patience.Stop()
	select {
	case at.turn <- struct{}{}:
		return true
	case <-patience.C:
		g.forget(key, at)
		return false
	}
}

func (g *gates) leave(key string) {
	g.mu.Lock()
	at := g.byKey[key]
	g.mu.Unlock()
	<-at.turn
	g.forget(key, at)
}

func (g *gates) forget(key string, at *gate) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if at.users--; at.users == 0 {
		delete(g.byKey, key)
	}
}

// A process learns at once that a lock is free which it has released itself; others find out by
// asking. So that they have a chance, too, its callers who wait let as much time pass as that may take,
// about once in yieldEvery for which the process has had the lock: a sixteenth of the time at most.
const yieldEvery = 16 * maxPoll

func (q *quorum) yield(b *ballot) {
	now := time.Now()
	if now.Sub(b.since) <= rand.N(yieldEvery) {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	maps.DeleteFunc(q.yields, func(_ string, until time.Time) bool { return until.Before(now) })
	q.yields[b.key] = now.Add(maxPoll + time.Millisecond)
}

func (q *quorum) yielding(key string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return time.Now().Before(q.yields[key])
}
