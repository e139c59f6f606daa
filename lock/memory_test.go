package lock_test

import (
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock/locktest"
)

func TestMemoryConformance(t *testing.T) {
	store := lock.NewMemory()
	locktest.TestStore(t, []locktest.Ability{locktest.Fences, locktest.Line}, func(*testing.T) locktest.World {
		return locktest.World{Open: func() lock.Store { return store }}
	})
}
