package redislock

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// stayers are the requests that wait whether their senders are there or not. Nothing else ends their
// waiting when the process exits, and what nobody hears of would be lost without a trace.
var stayers = newStaying()

func init() {
	caddy.OnExit(func(context.Context) { stayers.exit() }) // when the grace period is over
}

var errExiting = errors.New("caddy exits, and its grace period is over")

type staying struct {
	mu      sync.Mutex
	ends    map[*int]context.CancelCauseFunc
	exiting bool
	idle    chan struct{} // once exit waits: closed when nobody is left
}

func newStaying() *staying { return &staying{ends: make(map[*int]context.CancelCauseFunc)} }

// begin returns a context that ends with parent and with exit. end must be called when its request
// has been answered, or got the lock.
func (s *staying) begin(parent context.Context) (ctx context.Context, end func()) {
	ctx, cancel := context.WithCancelCause(parent)
	key := new(int)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends[key] = cancel
	if s.exiting {
		cancel(errExiting)
	}
	return ctx, func() {
		cancel(nil)
		s.mu.Lock()
		defer s.mu.Unlock()
		if delete(s.ends, key); len(s.ends) == 0 && s.idle != nil {
			close(s.idle)
			s.idle = nil
		}
	}
}

// exit ends the waiting, and gives those who waited the time to leave the line and to say so.
func (s *staying) exit() {
	idle := make(chan struct{})
	s.mu.Lock()
	s.exiting = true
	for _, end := range s.ends {
		end(errExiting)
	}
	if len(s.ends) > 0 {
		s.idle = idle
	} else {
		close(idle)
	}
	s.mu.Unlock()
	select {
	case <-idle:
	case <-time.After(2 * lock.DefaultOpTimeout): // for a question under way, and a release
	}
}
