package lock_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// newLockers returns Lockers with connections of their own to one server, as in several processes.
func newLockers(t *testing.T, server *redistest.Server, n int) (lockers []*lock.Locker) {
	t.Helper()
	for range n {
		l := lock.New(openGetSet(t, server), lock.Options{OpTimeout: time.Minute})
		lockers = append(lockers, l)
	}
	return lockers
}

// inLine waits until n stand in the line of the lock "name".
func inLine(t *testing.T, server *redistest.Server, n int) {
	t.Helper()
	await(t, fmt.Sprint(n, " to stand in line"), func() bool {
		length, err := server.Client.ZCard(t.Context(), "{lock.name}:line").Result()
		if err != nil {
			t.Fatal(err)
		}
		return int(length) == n
	})
}

// noTrace fails if anything is left in the server but fences.
func noTrace(t *testing.T, server *redistest.Server) {
	t.Helper()
	keys, err := server.Client.Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if fields := server.Client.HKeys(t.Context(), key).Val(); !slices.Equal(fields, []string{"f"}) {
			t.Errorf("%s is left, with %v", key, fields)
		}
	}
}

// serve lines callers up, each when the one before stands in line, and returns in which order
// they got the lock, once it was released.
func serve(t *testing.T, server *redistest.Server, callers []*lock.Locker, meanwhile func(), options ...lock.AcquireOption) (order []int) {
	t.Helper()
	first := acquire(t, callers[0], "name")
	var waiting sync.WaitGroup
	for i, l := range callers {
		waiting.Go(func() {
			h, err := l.Acquire(t.Context(), "name", append([]lock.AcquireOption{lock.Wait(time.Minute), lock.Queue(len(callers))}, options...)...)
			if err != nil {
				t.Errorf("caller %d: %v", i, err)
				return
			}
			order = append(order, i) // guarded by the lock
			if err := h.Release(context.Background()); err != nil {
				t.Errorf("caller %d: %v", i, err)
			}
		})
		inLine(t, server, i+1)
	}
	meanwhile()
	if err := first.Release(context.Background()); err != nil {
		t.Error(err)
	}
	waiting.Wait()
	return order
}

func inOrder(n int) (order []int) {
	for i := range n {
		order = append(order, i)
	}
	return order
}

// A request in line costs three calls to Redis at most: one to take its place, one to confirm if
// the lock comes from another process, and one to give it back.
func TestCallsInLine(t *testing.T) {
	t.Parallel()
	for processes, most := range map[int]int{1: 2, 3: 3} {
		t.Run(fmt.Sprint(processes), func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			lockers := newLockers(t, server, processes)
			const callers = 90
			var in []*lock.Locker
			for i := range callers {
				in = append(in, lockers[i%processes])
			}
			serve(t, server, in[:3], func() {}) // the first who wait subscribe
			before, begin := server.Commands(t)["evalsha"], time.Now()
			order := serve(t, server, in, func() {})
			calls := server.Commands(t)["evalsha"] - before
			if !slices.Equal(order, inOrder(callers)) {
				t.Errorf("served in the order %v", order)
			}
			beats := processes * (int(time.Since(begin)/lock.Heartbeat) + 1)
			if limit := most*callers + 2 + beats; calls > limit {
				t.Errorf("%d calls for %d in line, want %d at most", calls, callers, limit)
			}
			noTrace(t, server)
		})
	}
}

// Whatever happens to the messages, those in line are served, and in their order.
func TestMessagesGetLost(t *testing.T) {
	t.Parallel()
	for name, meanwhile := range map[string]func(*testing.T, *redistest.Server){
		"subscriptions broken": func(t *testing.T, s *redistest.Server) {
			s.Client.Do(t.Context(), "client", "kill", "type", "pubsub")
		},
		"never sent": func(t *testing.T, s *redistest.Server) {
			if err := s.Client.Do(t.Context(), "acl", "setuser", "default", "-publish").Err(); err != nil {
				t.Error(err)
			}
		},
		"line lost": func(t *testing.T, s *redistest.Server) {
			s.Client.Del(t.Context(), "{lock.name}:line", "{lock.name}:alive")
			inLine(t, s, 12) // with their places
		},
		"scripts lost": func(t *testing.T, s *redistest.Server) { s.Client.ScriptFlush(t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "never sent" {
			}
			server := redistest.Start(t)
			lockers := newLockers(t, server, 3)
			var in []*lock.Locker
			for i := range 12 {
				in = append(in, lockers[i%3])
			}
			order := serve(t, server, in, func() { meanwhile(t, server) })
			if !slices.Equal(order, inOrder(12)) {
				t.Errorf("served in the order %v", order)
			}
			noTrace(t, server)
		})
	}
}

// Redis comes back empty while some wait: they take their places again, and are served.
func TestLineOutlastsRestart(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	lockers := newLockers(t, server, 2)
	var waiting sync.WaitGroup
	first := acquire(t, lockers[0], "name", lock.Lease(time.Second))
	for i := range 6 {
		waiting.Go(func() {
			h, err := lockers[i%2].Acquire(t.Context(), "name", lock.Wait(5*time.Minute))
			if err != nil {
				t.Errorf("caller %d: %v", i, err)
				return
			}
			if err := h.Release(context.Background()); err != nil {
				t.Errorf("caller %d: %v", i, err)
			}
		})
		inLine(t, server, i+1)
	}
	server.Now(t) // by the next answer, the one to the last caller is on its way
	server.Kill()
	server.Restart(t)
	waiting.Wait()
	_ = first.Release(context.Background()) // lost with the rest
	noTrace(t, server)
}

// Without the right to subscribe, or to publish, those in line ask, and the Locker says so once.
func TestDeaf(t *testing.T) {
	t.Parallel()
	for _, missing := range []string{"subscribe", "publish"} {
		t.Run(missing, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			server.AddUser(t, "deaf", "allkeys", "allchannels", "+@all", "-"+missing)
			reasons := make(chan error, 10)
			client := redis.NewClient(&redis.Options{
				Addr: server.Addr, Username: "deaf", Password: "pass", MaxRetries: -1, ContextTimeoutEnabled: true,
			})
			l := lock.New(lock.NewGetSet(client), lock.Options{OnDeaf: func(err error) { reasons <- err }})
			order := serve(t, server, slices.Repeat([]*lock.Locker{l, newLockers(t, server, 1)[0]}, 4), func() {})
			if !slices.Equal(order, inOrder(8)) {
				t.Errorf("served in the order %v", order)
			}
			if err := <-reasons; err == nil || !strings.Contains(err.Error(), missing) {
				t.Errorf("reason %v, want one that names %s", err, missing)
			}
			if err := l.Close(context.Background()); err != nil {
				t.Error(err)
			}
			if n := len(reasons); n != 0 {
				t.Errorf("said another %d times that the Store does not tell of hand-overs", n)
			}
			noTrace(t, server)
		})
	}
}

// A Redis that hangs when a process subscribes is away, and not a Redis that does not tell.
func TestHungSubscription(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	server.Pause()
	found := make(chan error, 10)
	store.Listen(lock.NewProcess(), lock.Listener{
		Handed:    func(lock.Token) {},
		Listening: func(on bool, err error) { found <- err },
	})
	if err := <-found; err != nil {
		t.Errorf("reason %v, want none: other operations find it out", err)
	}
	server.Resume()
}
