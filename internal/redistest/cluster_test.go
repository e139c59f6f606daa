package redistest

import (
	"slices"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestStartCluster(t *testing.T) {
	t.Parallel()
	c := StartCluster(t)
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs})
	defer client.Close()
	for _, key := range []string{"a", "b", "c", "d", "e", "f"} {
		if err := client.Set(t.Context(), key, 1, 0).Err(); err != nil {
			t.Errorf("set %s: %v", key, err)
		}
		if n := c.MasterOf(t, key).Client.Exists(t.Context(), key).Val(); n != 1 {
			t.Errorf("%s is not at the master of its key", key)
		}
	}
	if c.MasterOf(t, "a") == c.MasterOf(t, "b") {
		t.Error("one node serves slots of different thirds")
	}

	master := c.MasterOf(t, "a")
	graceful := c.Failover(t, master)
	if graceful == master || c.MasterOf(t, "a") != graceful {
		t.Error("the failover changed nothing")
	}
	graceful.Kill()
	if again := c.AwaitFailover(t, graceful); again != master || c.MasterOf(t, "a") != master {
		t.Error("the former master did not take over from the one that was killed")
	}
	if err := client.Get(t.Context(), "a").Err(); err != nil {
		t.Errorf("the key after two failovers: %v", err)
	}
	graceful.Restart(t)
	await(t, "the killed node to be a replica in sync", func() bool { return replicasInSync(t, master) == 1 })
}

func TestMoveSlot(t *testing.T) {
	t.Parallel()
	c := StartCluster(t)
	const first, second, fresh = "{a}:1", "{a}:2", "{a}:3"
	from := c.MasterOf(t, "a")
	to := c.Servers[(slices.Index(c.Servers, from)+1)%3]
	for _, key := range []string{first, second} {
		result(t, from.Client.Set(t.Context(), key, key, 0))
	}
	c.MoveSlot(t, c.Slot(t, "a"), to, func() {
		if err := from.Client.Get(t.Context(), first).Err(); !redis.HasErrorPrefix(err, "ASK") {
			t.Errorf("halfway, the first key at its old node: %v, want a word that it has moved", err)
		}
		if err := from.Client.Get(t.Context(), second).Err(); err != nil {
			t.Errorf("halfway, the second key at its old node: %v", err)
		}
		for _, server := range []*Server{from, to} {
			if err := server.Client.MGet(t.Context(), first, second).Err(); err == nil {
				t.Errorf("halfway, both keys are at %s", server.Addr)
			}
		}
		client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs})
		defer client.Close()
		if err := client.Set(t.Context(), fresh, fresh, 0).Err(); err != nil {
			t.Errorf("halfway, a new key: %v", err)
		}
	})
	for _, key := range []string{first, second, fresh} {
		if value := to.Client.Get(t.Context(), key).Val(); value != key {
			t.Errorf("%s holds %q at its new node", key, value)
		}
	}
	if c.MasterOf(t, "a") != to {
		t.Error("the slot has not moved")
	}
	if err := from.Client.Get(t.Context(), first).Err(); !redis.HasErrorPrefix(err, "MOVED") {
		t.Errorf("the first key at its old node: %v, want a word that it has moved for good", err)
	}
}
