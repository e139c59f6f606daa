package lock_test

import (
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock/locktest"
)

func TestMemoryConformance(t *testing.T) {
	locktest.TestStore(t, func(*testing.T) func() lock.Store {
		store := lock.NewMemory()
		return func() lock.Store { return store }
	})
}
