package lock_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
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
	if err := server.Client.Set(t.Context(), markerKey, server.RunID(t)+" 1", 0).Err(); err != nil {
		t.Fatal(err)
	}
}

func openQuorum(t *testing.T, servers []*redistest.Server) lock.Store {
	t.Helper()
	store := newQuorum(servers)
	t.Cleanup(func() { store.Close() })
	return store
}

func newQuorum(servers []*redistest.Server) lock.Store {
	var nodes []lock.Node
	for _, server := range servers {
		nodes = append(nodes, lock.Node{Store: lock.NewGetSetNode(redis.NewUniversalClient(clientOptions(server.Addr)))})
	}
	return lock.NewQuorum(nodes...)
}

func newQuorumLocker(t *testing.T, servers []*redistest.Server, o lock.Options) *lock.Locker {
	t.Helper()
	l := lock.New(newQuorum(servers), o)
	t.Cleanup(func() { _ = l.Close(context.Background()) })
	return l
}

// has is true if the lock's key is there.
func has(t *testing.T, server *redistest.Server) bool {
	t.Helper()
	return server.Client.Exists(t.Context(), mainKey).Val() == 1
}

// patient bounds an operation so that whoever waits for a node that hangs fails by that.
func patient(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// Servers that nobody asks for a lock have waited for long enough when somebody does.
func TestQuorumMarksNodes(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	openQuorum(t, []*redistest.Server{server})
	mark := func() string { return server.Client.Get(t.Context(), markerKey).Val() }
	await(t, "the server is marked", func() bool { return strings.HasPrefix(mark(), server.RunID(t)+" ") })
}

// A node without a vote: whoever has given the lock back can have it again at once.
func TestQuorumReleasedIsFree(t *testing.T) {
	t.Parallel()
	servers := startNodes(t, 3)
	store := openQuorum(t, servers)
	servers[0].Client.FlushAll(t.Context())
	for range 200 {
		claim := lock.Claim{Token: newToken(), Lease: time.Hour}
		if _, err := store.Acquire(patient(t), mainKey, claim); err != nil {
			t.Fatal(err)
		}
		if _, err := store.Release(patient(t), mainKey, claim); err != nil {
			t.Fatal(err)
		}
	}
}

// Each of them is the one node whose absence makes no difference.
func TestQuorumDoesWithoutOneNode(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(*testing.T, *redistest.Server){
		"killed":  func(t *testing.T, s *redistest.Server) { s.Kill() },
		"hanging": func(t *testing.T, s *redistest.Server) { s.Pause() },
		"flushed": func(t *testing.T, s *redistest.Server) { s.Client.FlushAll(t.Context()) },
		"restarted": func(t *testing.T, s *redistest.Server) {
			s.Kill()
			s.Restart(t)
		},
	} {
		for _, when := range []string{"before", "while held"} {
			t.Run(name+" "+when, func(t *testing.T) {
				t.Parallel()
				servers := startNodes(t, 3)
				one, other := openQuorum(t, servers), openQuorum(t, servers)
				claim := lock.Claim{Token: newToken(), Lease: time.Minute}
				if when == "before" {
					fail(t, servers[1])
				}
				if g, err := one.Acquire(patient(t), mainKey, claim); err != nil || g.Fence != 0 {
					t.Fatalf("acquire: %+v, %v", g, err)
				}
				if when != "before" {
					await(t, "all have it", func() bool { return has(t, servers[0]) && has(t, servers[1]) && has(t, servers[2]) })
					fail(t, servers[1])
				}
				for _, store := range []lock.Store{one, other} {
					if _, err := store.Acquire(patient(t), mainKey, lock.Claim{Token: newToken(), Lease: time.Minute}); !errors.Is(err, lock.ErrHeld) {
						t.Errorf("acquire by another: %v, want held", err)
					}
					if err := store.Inspect(patient(t), mainKey, ""); !errors.Is(err, lock.ErrHeld) {
						t.Errorf("inspect: %v, want held", err)
					}
				}
				if g, err := one.Renew(patient(t), mainKey, claim); err != nil || g.TTL < time.Minute-time.Second {
					t.Errorf("renew: %+v, %v", g, err)
				}
				if _, err := one.Release(patient(t), mainKey, claim); err != nil {
					t.Errorf("release: %v", err)
				}
				if _, err := other.Acquire(patient(t), mainKey, lock.Claim{Token: newToken(), Lease: time.Minute}); err != nil {
					t.Errorf("acquire after that: %v", err)
				}
			})
		}
	}
}

func TestQuorumWithoutMajority(t *testing.T) {
	t.Parallel()
	servers := startNodes(t, 3)
	l := newQuorumLocker(t, servers, lock.Options{OpTimeout: 300 * time.Millisecond})
	servers[0].Kill()
	servers[1].Pause()
	for range 2 {
		_, err := l.Acquire(t.Context(), "foo")
		if !errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrHeld) {
			t.Fatalf("acquire: %v, want unavailable", err)
		}
		if text := err.Error(); !strings.Contains(text, "2 of 3 nodes did not answer: ") || !strings.Contains(text, "refused") {
			t.Errorf("error %q", text)
		}
	}
	servers[1].Resume()
	var h *lock.Handle
	await(t, "it recovers", func() (ok bool) {
		var err error
		h, err = l.Acquire(t.Context(), "foo", lock.Wait(time.Second))
		return err == nil
	})
	release(t, h)
	await(t, "nothing is left", func() bool { return !has(t, servers[1]) && !has(t, servers[2]) })
}

// A holds by the nodes 1 and 2. Node 2 forgets it, node 3 has never heard of it: their majority
// must not give the lock to B.
func TestQuorumNodeThatForgotHasNoVote(t *testing.T) {
	t.Parallel()
	for name, forget := range map[string]func(*testing.T, *redistest.Server){
		"flushed": func(t *testing.T, s *redistest.Server) { s.Client.FlushAll(t.Context()) },
		"restarted": func(t *testing.T, s *redistest.Server) {
			s.Kill()
			s.Restart(t)
		},
		"restarted with older data": func(t *testing.T, s *redistest.Server) {
			marker := s.Client.Get(t.Context(), markerKey).Val()
			s.Kill()
			s.Restart(t)
			s.Client.Set(t.Context(), markerKey, marker, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers := startNodes(t, 3)
			a := openQuorum(t, servers)
			servers[2].Kill()
			claim := lock.Claim{Token: newToken(), Lease: 3 * time.Second}
			if _, err := a.Acquire(patient(t), mainKey, claim); err != nil {
				t.Fatal(err)
			}
			forget(t, servers[1])
			servers[2].Restart(t)
			beOld(t, servers[2])
			b := openQuorum(t, servers)
			other := lock.Claim{Token: newToken(), Lease: 3 * time.Second}
			_, err := b.Acquire(patient(t), mainKey, other)
			if !errors.Is(err, lock.ErrHeld) {
				t.Fatalf("acquire by another: %v, want held", err)
			}
			await(t, "B gives back what it got", func() bool { return !has(t, servers[2]) })
			// A's renewal takes node 3, so that it can do without node 1.
			if _, err := a.Renew(patient(t), mainKey, claim); err != nil {
				t.Fatalf("renew: %v", err)
			}
			await(t, "node 3 has it", func() bool { return has(t, servers[2]) })
			servers[0].Kill()
			if _, err := b.Acquire(patient(t), mainKey, other); err == nil {
				t.Error("a node that has forgotten and none that has not gave the lock away")
			}
		})
	}
}

// All nodes are new: nothing can be locked yet, which is not contention, and passes.
func TestQuorumOfNewNodes(t *testing.T) {
	t.Parallel()
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t), redistest.Start(t)}
	store := openQuorum(t, servers)
	claim := lock.Claim{Token: newToken(), Lease: time.Second, Wait: true}
	_, err := store.Acquire(patient(t), mainKey, claim)
	if away, ok := errors.AsType[*lock.UnavailableError](err); !ok || away.Doubtful || errors.Is(err, lock.ErrHeld) ||
		!strings.Contains(err.Error(), "came up empty less than 3s ago") || !strings.Contains(err.Error(), "passes by itself") {
		t.Errorf("acquire: %v", err)
	}
	if err := store.Inspect(patient(t), mainKey, ""); !errors.Is(err, lock.ErrUnavailable) {
		t.Errorf("inspect: %v, want unavailable", err)
	}
	claim.LineUp = true
	if _, err := store.Acquire(patient(t), mainKey, claim); !errors.Is(err, lock.ErrUnavailable) {
		t.Errorf("lining up: %v, want unavailable", err)
	}
	claim.LineUp = false
	var firstSeen string
	await(t, "the node has a marker", func() bool {
		firstSeen = servers[0].Client.Get(t.Context(), markerKey).Val()
		return firstSeen != ""
	})
	if ttl := servers[0].Client.TTL(t.Context(), markerKey).Val(); ttl != -1 {
		t.Fatalf("marker %q with TTL %v, want one that stays", firstSeen, ttl)
	}
	await(t, "they vote", func() bool {
		_, err := store.Acquire(patient(t), mainKey, claim)
		return err == nil
	})
	if marker := servers[0].Client.Get(t.Context(), markerKey).Val(); marker != firstSeen {
		t.Errorf("marker %q, and %q later: want it to stay", firstSeen, marker)
	}
	servers[0].Client.Set(t.Context(), markerKey, strings.Fields(firstSeen)[0]+" 9000000000000000", 0)
	_, err = lock.NewGetSetNode(servers[0].Client).Acquire(t.Context(), "other", claim)
	if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Why != lock.Restarted || held.For > 5*time.Second {
		t.Errorf("acquire, with a marker from the future: %+v, want it to start again", err)
	}
}

// Who has the lock learns by its next renewal that it was released by force, also where a node
// missed that.
func TestQuorumForceRelease(t *testing.T) {
	t.Parallel()
	servers := startNodes(t, 3)
	store := openQuorum(t, servers)
	claim := lock.Claim{Token: newToken(), Lease: time.Minute}
	if _, err := store.Acquire(patient(t), mainKey, claim); err != nil {
		t.Fatal(err)
	}
	await(t, "all have it", func() bool { return has(t, servers[0]) && has(t, servers[1]) && has(t, servers[2]) })
	servers[0].Pause()
	if err := store.ForceRelease(patient(t), mainKey); err != nil {
		t.Fatalf("force release: %v", err)
	}
	servers[0].Resume()
	_, err := store.Renew(patient(t), mainKey, claim)
	if lost, ok := errors.AsType[*lock.LostError](err); !ok || lost.Why != lock.NotOwner {
		t.Errorf("renew: %v, want lost (not-owner)", err)
	}
	if has(t, servers[1]) || has(t, servers[2]) {
		t.Error("the renewal took it again")
	}
}

// A minority that was granted is given back, and a split vote is contention.
func TestQuorumSplitVote(t *testing.T) {
	t.Parallel()
	servers := startNodes(t, 3)
	store := openQuorum(t, servers)
	now := servers[0].Now(t).Unix()
	for _, server := range servers[:2] {
		server.Client.Set(t.Context(), mainKey, now+1000, 0)
	}
	_, err := store.Acquire(patient(t), mainKey, lock.Claim{Token: newToken(), Lease: time.Minute})
	if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Why != lock.ForeignHolder || held.For < 900*time.Second {
		t.Errorf("acquire: %+v, want held", err)
	}
	await(t, "the third is given back", func() bool { return !has(t, servers[2]) })
	servers[1].Kill()
	if _, err := store.Acquire(patient(t), mainKey, lock.Claim{Token: newToken(), Lease: time.Minute}); !errors.Is(err, lock.ErrHeld) {
		t.Errorf("acquire with one for it, one against and one down: %v, want held", err)
	}
	await(t, "the third is given back", func() bool { return !has(t, servers[2]) })
}

// A node that hung while the lock was taken and given back does not keep it.
func TestQuorumLeavesNothingOnNodeThatHung(t *testing.T) {
	t.Parallel()
	servers := startNodes(t, 3)
	l := newQuorumLocker(t, servers, lock.Options{OpTimeout: 300 * time.Millisecond})
	h := acquire(t, l, "foo", lock.Lease(time.Hour))
	await(t, "all have it", func() bool { return has(t, servers[0]) && has(t, servers[1]) && has(t, servers[2]) })
	servers[1].Pause()
	release(t, h)
	for range 3 {
		release(t, acquire(t, l, "foo", lock.Lease(time.Hour)))
	}
	servers[1].Resume()
	servers[0].Kill() // so that it matters
	await(t, "it is free", func() bool {
		h, err := l.Acquire(t.Context(), "foo", lock.Lease(time.Hour))
		if err == nil {
			release(t, h)
		}
		return err == nil
	})
	await(t, "nothing is left", func() bool { return !has(t, servers[1]) && !has(t, servers[2]) })
}

// A section counts who is in it.
type section struct {
	inside, overlap, times atomic.Int64
}

// run is in the section while the handle's context lasts, for a moment.
func (s *section) run(h *lock.Handle, lasts time.Duration) {
	if s.inside.Add(1) > 1 {
		s.overlap.Add(1)
	}
	s.times.Add(1)
	select {
	case <-h.Context().Done():
	case <-time.After(lasts):
	}
	s.inside.Add(-1)
}

// Many who compete, in several processes: one at a time, and each has its turn.
func TestQuorumContention(t *testing.T) {
	t.Parallel()
	const processes, callers, turns = 8, 4, 5
	servers := startNodes(t, 3)
	var work section
	var wg sync.WaitGroup
	for range processes {
		l := newQuorumLocker(t, servers, lock.Options{})
		for range callers {
			wg.Go(func() {
				for range turns {
					h, err := l.Acquire(t.Context(), "foo", lock.Wait(time.Minute))
					if err != nil {
						t.Errorf("acquire: %v", err)
						return
					}
					work.run(h, time.Millisecond)
					release(t, h)
				}
			})
		}
	}
	begin := time.Now()
	wg.Wait()
	t.Logf("%d turns in %v", work.times.Load(), time.Since(begin))
	if work.overlap.Load() > 0 {
		t.Errorf("two at once, %d times", work.overlap.Load())
	}
}

// One node at a time is killed, hangs and is flushed, under load.
func TestQuorumFaultsInTurn(t *testing.T) {
	t.Parallel()
	const lease = 2 * time.Second
	servers := startNodes(t, 3)
	ctx, stop := context.WithCancel(t.Context())
	var work section
	var wg sync.WaitGroup
	for range 4 {
		l := newQuorumLocker(t, servers, lock.Options{})
		for range 2 {
			wg.Go(func() {
				for ctx.Err() == nil {
					h, err := l.Acquire(ctx, "foo", lock.Lease(lease), lock.Wait(time.Minute))
					if err != nil {
						if ctx.Err() == nil {
							t.Errorf("acquire: %v", err)
						}
						return
					}
					// Some last for longer than a lease: what keeps them is renewals.
					lasts := 5 * time.Millisecond
					if work.times.Load()%10 == 0 {
						lasts = 5 * lease / 4
					}
					work.run(h, lasts)
					if err := h.Release(context.WithoutCancel(ctx)); err != nil {
						t.Errorf("release: %v", err)
					}
				}
			})
		}
	}
	proceeds := func(what string) {
		before := work.times.Load()
		await(t, "the lock is taken while a node "+what, func() bool { return work.times.Load() > before+10 })
	}
	wellForTwoLeases := func() {
		proceeds("is back")
		time.Sleep(2 * lease)
	}
	votes := func(s *redistest.Server) {
		node := openQuorum(t, []*redistest.Server{s})
		await(t, "it votes", func() bool {
			_, err := node.Acquire(patient(t), "other", lock.Claim{Token: newToken(), Lease: lease})
			return err == nil || errors.Is(err, lock.ErrHeld)
		})
	}
	proceeds("is well")
	servers[0].Kill()
	proceeds("is down")
	servers[0].Restart(t)
	votes(servers[0])
	wellForTwoLeases()
	servers[1].Pause()
	proceeds("hangs")
	servers[1].Resume()
	wellForTwoLeases()
	servers[2].Client.FlushAll(t.Context())
	proceeds("was flushed")
	votes(servers[2])
	wellForTwoLeases()
	stop()
	wg.Wait()
	if work.overlap.Load() > 0 {
		t.Errorf("two at once, %d of %d times", work.overlap.Load(), work.times.Load())
	}
}

// A process whose callers come one after the other does not keep the caller of another process
// from its turn for long.
func TestQuorumBusyProcessLetsOthersIn(t *testing.T) {
	t.Parallel()
	const requests, fair = 6, 12 // turns of others before one's own, on average
	servers := startNodes(t, 3)
	busy, other := newQuorumLocker(t, servers, lock.Options{}), newQuorumLocker(t, servers, lock.Options{})
	ctx, stop := context.WithCancel(t.Context())
	var work section
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				h := acquire(t, busy, "foo", lock.Wait(time.Minute))
				work.run(h, 250*time.Millisecond)
				release(t, h)
			}
		})
	}
	var waited int64
	for range requests {
		before := work.times.Load()
		await(t, "the others have had a turn", func() bool { return work.times.Load() > before })
		before = work.times.Load()
		h := acquire(t, other, "foo", lock.Wait(time.Minute))
		waited += work.times.Load() - before
		release(t, h)
	}
	stop()
	wg.Wait()
	if waited > requests*fair {
		t.Errorf("%d requests waited for %d turns of others, want %d at most", requests, waited, requests*fair)
	}
}
