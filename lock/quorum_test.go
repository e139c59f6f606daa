package lock_test

import (
	"regexp"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock/locktest"
	"github.com/redis/go-redis/v9"
)

const markerKey = "{redis_lock}:since"

// startNodes starts servers that may vote at once, as if they had been up for long.
func startNodes(t *testing.T, n int) []*redistest.Server {
	t.Helper()
	var servers []*redistest.Server
	for range n {
		server := redistest.Start(t)
		beOld(t, server)
		servers = append(servers, server)
	}
	return servers
}

// beOld has a server vote at once.
func beOld(t *testing.T, server *redistest.Server) {
	t.Helper()
	info, err := server.Client.Info(t.Context(), "server").Result()
	if err != nil {
		t.Fatal(err)
	}
	run := regexp.MustCompile(`run_id:(\w+)`).FindStringSubmatch(info)[1]
	if err := server.Client.Set(t.Context(), markerKey, run+" 1", 0).Err(); err != nil {
		t.Fatal(err)
	}
}

func openQuorum(t *testing.T, servers []*redistest.Server) lock.Store {
	t.Helper()
	var nodes []lock.Store
	for _, server := range servers {
		nodes = append(nodes, lock.NewGetSetNode(redis.NewClient(&redis.Options{
			Addr: server.Addr, MaxRetries: -1, DialerRetries: 1, ContextTimeoutEnabled: true,
		})))
	}
	store := lock.NewQuorum(nodes...)
	t.Cleanup(func() { store.Close() })
	return store
}

func TestQuorumConformance(t *testing.T) {
	servers := startNodes(t, 3)
	locktest.TestStore(t, nil, func(t *testing.T) func() lock.Store {
		return func() lock.Store { return openQuorum(t, servers) }
	})
}
