package lock

import (
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
