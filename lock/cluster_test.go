package lock_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// A message about a hand-over stays in one shard.
func TestClusterTellsInOneShard(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	open := overCluster(t, cluster)
	here, there := lock.New(open(), lock.Options{}), lock.New(open(), lock.Options{})
	h := acquire(t, here, "name")
	waiting := waitInLine(t, there, "name")
	await(t, "the waiter to listen", func() bool { return ran(t, cluster, "spublish") >= 1 }) // its own message
	before := ran(t, cluster, "spublish")
	release(t, h)
	release(t, <-waiting)
	await(t, "the hand-over to be told", func() bool { return ran(t, cluster, "spublish") > before })
	if n := ran(t, cluster, "publish"); n != 0 {
		t.Errorf("%d messages to all nodes", n)
	}
	closeAll(t, here, there)
}

// A cluster from before Redis 7 has no messages that stay in one shard.
func TestOldClusterTellsAllNodes(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, "--rename-command", "spublish", "", "--rename-command", "ssubscribe", "")
	open := overCluster(t, cluster)
	here, there := lock.New(open(), lock.Options{}), lock.New(open(), lock.Options{})
	h := acquire(t, here, "name")
	waiting := waitInLine(t, there, "name")
	await(t, "the waiter to listen", func() bool { return ran(t, cluster, "publish") >= 1 }) // its own message
	before := ran(t, cluster, "publish")
	release(t, h)
	release(t, <-waiting)
	await(t, "the hand-over to be told", func() bool { return ran(t, cluster, "publish") > before })
	closeAll(t, here, there)
}

// ran returns how often the masters ran a command.
func ran(t *testing.T, cluster *redistest.Cluster, command string) (n int) {
	for _, server := range cluster.Servers[:3] {
		n += server.Commands(t)[command]
	}
	return n
}

// waitInLine acquires in the background.
func waitInLine(t *testing.T, l *lock.Locker, name string) <-chan *lock.Handle {
	t.Helper()
	got := make(chan *lock.Handle, 1)
	go func() {
		h, err := l.Acquire(t.Context(), name, lock.Wait(time.Minute))
		if err != nil {
			t.Errorf("acquire: %v", err)
		}
		got <- h
	}()
	return got
}

func closeAll(t *testing.T, lockers ...*lock.Locker) {
	t.Helper()
	for _, l := range lockers {
		if err := l.Close(t.Context()); err != nil {
			t.Errorf("close: %v", err)
		}
	}
}

// The keys of a lock move to another server while it is held and somebody waits.
func TestSlotMovesWhileHeld(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	open := overCluster(t, cluster)
	here, there := lock.New(open(), lock.Options{OpTimeout: 20 * time.Second}), lock.New(open(), lock.Options{OpTimeout: 20 * time.Second})
	for round, name := range []string{"plain", "with {tag}"} {
		key := lock.Key("lock.", name)
		from := cluster.MasterOf(t, key)
		to := cluster.Servers[0]
		if to == from {
			to = cluster.Servers[1]
		}
		h := acquire(t, here, name, lock.Lease(3*time.Second))
		waiting := waitInLine(t, there, name)
		await(t, "the waiter to stand in line", func() bool {
			return from.Client.ZCard(t.Context(), "{"+key+"}:line").Val() == 1
		})
		newcomers := make(chan error, 1)
		deadline := h.Deadline()
		cluster.MoveSlot(t, cluster.Slot(t, key), to, func() {
			go func() {
				_, err := there.Acquire(t.Context(), name) // keys on both servers: TRYAGAIN
				newcomers <- err
			}()
		})
		wantError(t, <-newcomers, lock.ErrHeld)
		if n := to.Client.Exists(t.Context(), key).Val(); n != 1 {
			t.Fatalf("round %d: the lock has not moved", round)
		}
		await(t, "a renewal on the new server", func() bool { return h.Deadline().After(deadline) })
		release(t, h)
		next := <-waiting
		if next.Fence() <= h.Fence() {
			t.Errorf("fence %d after %d", next.Fence(), h.Fence())
		}
		release(t, next)
	}
	closeAll(t, here, there)
}

// A lock that is gone is not given back without an error because its slot has moved.
func TestLostLockMoves(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	l := lock.New(overCluster(t, cluster)(), lock.Options{})
	h := acquire(t, l, "name")
	from, to := cluster.MasterOf(t, "lock.name"), cluster.Servers[0]
	if to == from {
		to = cluster.Servers[1]
	}
	from.Client.Del(t.Context(), "lock.name")
	from.Client.Del(t.Context(), "{lock.name}:holder")
	cluster.MoveSlot(t, cluster.Slot(t, "lock.name"), to, func() {})
	wantError(t, h.Release(t.Context()), lock.ErrLost)
	closeAll(t, l)
}

// A master dies while its lock is held: its replica has the lock, too. Locks on other masters do
// not notice.
func TestMasterOfClusterDies(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	open := overCluster(t, cluster)
	var outages, recoveries atomic.Int32
	l := lock.New(open(), lock.Options{
		OnOutage: func(error) { outages.Add(1) }, OnRecovery: func(time.Duration) { recoveries.Add(1) },
	})
	var names []string // two on the first master, one on the second
	for i := 0; len(names) < 3; i++ {
		if name := fmt.Sprint("name", i); cluster.MasterOf(t, "lock."+name) == cluster.Servers[len(names)/2] {
			names = append(names, name)
		}
	}
	h := acquire(t, l, names[0])
	old := cluster.Servers[0]
	old.Replicate(t, 1)
	old.Kill()
	_, err := l.Acquire(t.Context(), names[1])
	wantError(t, err, lock.ErrUnavailable)
	release(t, acquire(t, l, names[2]))
	cluster.AwaitFailover(t, old)
	await(t, "the shard to be available", func() bool {
		other, err := l.Acquire(t.Context(), names[1])
		if err != nil {
			return false
		}
		release(t, other)
		return true
	})
	if outages.Load() != 1 || recoveries.Load() != 1 {
		t.Errorf("%d outages, %d recoveries; want one that is over, though its server never comes back", outages.Load(), recoveries.Load())
	}
	other := lock.New(open(), lock.Options{})
	_, err = other.Acquire(t.Context(), names[0])
	wantError(t, err, lock.ErrHeld)
	release(t, h)
	release(t, acquire(t, other, names[0]))
	closeAll(t, l, other)
}

func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}
