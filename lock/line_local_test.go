package lock_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// countAcquires lets questions through, and returns how many there were since the last call.
func countAcquires(store *faulty) func() int {
	var asked atomic.Int32
	store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
		asked.Add(1)
		return next()
	})
	return func() int { return int(asked.Swap(0)) }
}

func refuseConnections(func() (lock.Grant, error)) (lock.Grant, error) {
	return lock.Grant{}, errNoDial
}

// dies has a process that never asks hold the lock.
func dies(t *testing.T, store *faulty, lease time.Duration) {
	t.Helper()
	if _, err := store.Store.Acquire(t.Context(), "lock.name", lock.Claim{Token: newToken(), Lease: lease}); err != nil {
		t.Fatal(err)
	}
}

// waits starts a waiter, which appends its id when it has the lock and gives it back.
func waits(t *testing.T, l *lock.Locker, group *sync.WaitGroup, served *[]int, id int, options ...lock.AcquireOption) {
	group.Go(func() {
		h := acquire(t, l, "name", append([]lock.AcquireOption{lock.Wait(time.Hour)}, options...)...)
		*served = append(*served, id) // guarded by the lock
		release(t, h)
	})
	synctest.Wait()
}

// The first in line asks for all, every Heartbeat.
func TestOneAsksForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, l, "name")
		count := countAcquires(store)
		var waiting sync.WaitGroup
		var served []int
		for i := range 10 {
			waits(t, l, &waiting, &served, i)
		}
		count()
		time.Sleep(10*lock.Heartbeat + lock.Heartbeat/2)
		if n := count(); n < 9 || n > 11 {
			t.Errorf("asked %d times in 10 heartbeats", n)
		}
		release(t, h)
		waiting.Wait()
	})
}

// While the Store is away, too, and the holder is here.
func TestNoStormDuringOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, l, "name", lock.Lease(time.Hour))
		var waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 0)
		var asked atomic.Int32
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) {
			asked.Add(1)
			return lock.Grant{}, errNoDial
		})
		store.onRenew(noRenewal)
		time.Sleep(100 * lock.Heartbeat)
		if n := asked.Load(); n > 101 {
			t.Errorf("asked %d times in 100 heartbeats", n)
		}
		store.onRenew(nil) // half of it is back
		asked.Store(0)
		time.Sleep(100 * lock.Heartbeat)
		if n := asked.Load(); n > 200 {
			t.Errorf("asked %d times in 100 heartbeats while the Store comes and goes", n)
		}
		store.onAcquire(nil)
		release(t, h)
		waiting.Wait()
	})
}

// A lock whose holder died is had at its end, not at some later beat; also when the first has left.
func TestHolderDiesElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		dies(t, store, 2*time.Second)
		begin := time.Now()
		ctx, leave := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		waiting.Go(func() {
			_, err := l.Acquire(ctx, "name", lock.Wait(time.Hour))
			wantError(t, err, context.Canceled)
		})
		synctest.Wait()
		var served []int
		waits(t, l, &waiting, &served, 0)
		leave()
		waiting.Wait()
		if waited := time.Since(begin); waited < 2*time.Second || waited > 2*time.Second+10*time.Millisecond {
			t.Errorf("had after %v, want when the lease of 2s has passed", waited)
		}
	})
}

func TestNextOneAsksWhenLockIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, l, "name")
		var waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 0)
		if err := store.ForceRelease(t.Context(), "lock.name"); err != nil {
			t.Fatal(err)
		}
		<-h.Context().Done()
		lost := time.Now()
		waiting.Wait()
		if waited := time.Since(lost); waited != 0 {
			t.Errorf("the next one waited another %v", waited)
		}
		wantError(t, h.Release(context.Background()), lock.ErrLost)
	})
}

// The Store has forgotten a holder here, and gives the lock to the next one here: the holder stops.
func TestHolderIsDisplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, l, "name")
		var waiting sync.WaitGroup
		waiting.Go(func() {
			next := acquire(t, l, "name", lock.Wait(time.Hour))
			if h.Context().Err() == nil {
				t.Error("two have the lock")
			}
			wantLost(t, h, lock.NotOwner)
			release(t, next)
		})
		synctest.Wait()
		if err := store.ForceRelease(t.Context(), "lock.name"); err != nil {
			t.Fatal(err)
		}
		_, err := other.Acquire(t.Context(), "name") // by asking it hands over
		wantError(t, err, lock.ErrHeld)
		waiting.Wait()
	})
}

// Who arrives during an outage has a place as soon as that is over, and one in the queue.
func TestPlacesAfterOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, l, "name", lock.Lease(time.Hour))
		store.onAcquire(refuseConnections)
		var waiting sync.WaitGroup
		var served []int
		for i := range 3 {
			waits(t, l, &waiting, &served, i, lock.Queue(3))
		}
		store.onAcquire(nil)
		release(t, acquire(t, l, "another")) // the Store is back
		synctest.Wait()
		waits(t, other, &waiting, &served, 3)
		_, err := l.Acquire(t.Context(), "name", lock.Wait(time.Hour), lock.Queue(3))
		wantError(t, err, lock.ErrLineFull)
		release(t, h)
		waiting.Wait()
		if len(served) != 4 || served[3] != 3 {
			t.Fatalf("served in the order %v", served)
		}
	})
}

func TestManyComeAtOnceToAFullLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, other, "name")
		var full, served atomic.Int32
		var callers sync.WaitGroup
		for range 20 {
			callers.Go(func() {
				h, err := l.Acquire(t.Context(), "name", lock.Wait(time.Hour), lock.Queue(5))
				if err != nil {
					wantError(t, err, lock.ErrLineFull)
					full.Add(1)
					return
				}
				served.Add(1)
				release(t, h)
			})
		}
		synctest.Wait()
		release(t, h)
		callers.Wait()
		if full.Load() != 15 || served.Load() != 5 {
			t.Errorf("%d found the line full and %d were served, want 15 and 5", full.Load(), served.Load())
		}
	})
}

// A wait that ends while the Store hangs, of which nobody knows yet.
func TestWaitEndsWhileStoreHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		hang := func(func() error) error {
			time.Sleep(lock.DefaultOpTimeout)
			return errNoReply
		}
		elsewhere, here := acquire(t, other, "name"), acquire(t, l, "mine")
		store.onRelease(hang)
		for name, want := range map[string]error{"name": lock.ErrUnavailable, "mine": lock.ErrTimeout} {
			_, err := l.Acquire(t.Context(), name, lock.Wait(100*time.Millisecond))
			wantError(t, err, want)
			store.onRelease(nil)
			release(t, acquire(t, l, "another")) // nobody knows of an outage
			time.Sleep(time.Minute)
			store.onRelease(hang)
		}
		store.onRelease(nil)
		release(t, elsewhere)
		release(t, here)
	})
}

// A holder of a lost lock that does not stop keeps those out who would take the lock locally.
func TestNobodyIsLocalBesideALostHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		stuck := acquire(t, l, "name", lock.Lease(time.Second))
		store.onRenew(noRenewal)
		<-stuck.Context().Done()
		time.Sleep(time.Second)
		store.onRenew(nil)
		second := acquire(t, l, "name") // by the Store
		var waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 0, lock.OrLocal())
		away := func(func() error) error { return errNoDial }
		store.onAcquire(refuseConnections)
		store.onRelease(away)
		wantError(t, second.Release(context.Background()), lock.ErrUnavailable)
		_, err := l.Acquire(t.Context(), "name", lock.OrLocal())
		wantError(t, err, lock.ErrHeld)
		time.Sleep(time.Second)
		if len(served) != 0 {
			t.Error("served while the holder of a lost lock has not stopped")
		}
		wantError(t, stuck.Release(context.Background()), lock.ErrLost)
		waiting.Wait()
		store.onAcquire(nil)
		store.onRelease(nil)
	})
}

// The Store comes back while a local lock is held, and grants a question that was under way: that one
// waits for the local holder, does not ask all the time, and is the next.
func TestGrantMeetsLocalHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		var asked atomic.Int32
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			switch asked.Add(1) {
			case 1:
				time.Sleep(100 * time.Millisecond)
				return lock.Grant{}, errNoDial
			case 2:
				time.Sleep(200 * time.Millisecond)
			}
			return next()
		})
		local := make(chan *lock.Handle, 1)
		go func() { local <- acquire(t, l, "name", lock.OrLocal()) }()
		synctest.Wait()
		var waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 0, lock.Lease(24*time.Hour))
		time.Sleep(time.Second)
		waits(t, l, &waiting, &served, 1, lock.Lease(24*time.Hour))
		asked.Store(0)
		time.Sleep(10 * lock.Heartbeat)
		if n := asked.Load(); n > 22 {
			t.Errorf("asked %d times in 10 heartbeats", n)
		}
		if len(served) != 0 {
			t.Error("two have the lock")
		}
		begin := time.Now()
		release(t, <-local)
		waiting.Wait()
		if waited := time.Since(begin); waited != 0 {
			t.Errorf("the next one waited another %v", waited)
		}
	})
}

// What an attempt without an answer, or a wait, left in the Store goes with the local lock.
func TestLocalLockLeavesNothingInStore(t *testing.T) {
	for _, placed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			l, store := newLocker(t)
			var waiting sync.WaitGroup
			var served []int
			if placed {
				h := acquire(t, l, "name")
				waits(t, l, &waiting, &served, 0, lock.OrLocal(), lock.Lease(24*time.Hour))
				store.onAcquire(refuseConnections)
				store.onRelease(func(func() error) error { return errNoDial })
				wantError(t, h.Release(context.Background()), lock.ErrUnavailable)
			} else {
				store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
					if _, err := next(); err != nil {
						t.Error(err)
					}
					return lock.Grant{}, errNoReply
				})
				waits(t, l, &waiting, &served, 0, lock.OrLocal(), lock.Lease(24*time.Hour))
			}
			waiting.Wait()
			store.onAcquire(nil)
			store.onRelease(nil)
			time.Sleep(time.Minute)
			if err := store.Inspect(t.Context(), "lock.name", ""); err != nil {
				t.Errorf("left behind: %v", err)
			}
		})
	}
}

// deaf tells of no hand-over.
type deaf struct{ *faulty }

func (deaf) Listen(_ lock.Process, listener lock.Listener) {
	listener.Listening(false, errors.New("no permission"))
}

// Without messages the first in line polls if the lock comes from elsewhere, and not while the
// holder is here.
func TestDeafPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, store := newLocker(t)
		l := lock.New(deaf{store}, lock.Options{})
		count := countAcquires(store)
		var waiting sync.WaitGroup
		var served []int
		here := acquire(t, l, "name")
		waits(t, l, &waiting, &served, 0)
		count()
		time.Sleep(10 * lock.Heartbeat)
		if n := count(); n > 11 {
			t.Errorf("asked %d times in 10 heartbeats although the holder is here", n)
		}
		release(t, here)
		waiting.Wait()
		elsewhere := acquire(t, lock.New(store.Store, lock.Options{}), "name")
		waits(t, l, &waiting, &served, 1)
		time.Sleep(time.Second)
		begin := time.Now()
		release(t, elsewhere)
		waiting.Wait()
		if waited := time.Since(begin); waited > 100*time.Millisecond {
			t.Errorf("found out after %v", waited)
		}
	})
}

func TestHandOverIsHeardAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, lock.New(store.Store, lock.Options{}), "name")
		var waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 0)
		time.Sleep(lock.Heartbeat / 2)
		begin := time.Now()
		release(t, h)
		waiting.Wait()
		if waited := time.Since(begin); waited != 0 {
			t.Errorf("heard after %v", waited)
		}
	})
}

// Who leaves the line during an outage does not wait for the Store.
func TestLeavingDuringOutageIsImmediate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, l, "name")
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan error)
		go func() {
			_, err := l.Acquire(ctx, "name", lock.Wait(time.Hour))
			left <- err
		}()
		synctest.Wait()
		store.onAcquire(refuseConnections)
		store.onRelease(func(func() error) error {
			time.Sleep(lock.DefaultOpTimeout)
			return errNoReply
		})
		_, err := l.Acquire(t.Context(), "another")
		wantError(t, err, lock.ErrUnavailable)
		begin := time.Now()
		leave()
		wantError(t, <-left, context.Canceled)
		if took := time.Since(begin); took != 0 {
			t.Errorf("took %v", took)
		}
		store.onAcquire(nil)
		store.onRelease(nil)
		release(t, h)
	})
}

// An attempt without an answer may come long after the caller was served, by a later one.
func TestLateAttemptOfOneWhoWasServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, lock.New(store.Store, lock.Options{}), "name")
		var waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 0, lock.Lease(24*time.Hour))
		late := make(chan struct{})
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			store.onAcquire(nil)
			waiting.Go(func() {
				<-late
				_, _ = next()
			})
			return lock.Grant{}, errNoReply
		})
		time.Sleep(lock.Heartbeat)
		release(t, h)
		synctest.Wait()
		close(late)
		waiting.Wait()
		time.Sleep(time.Minute)
		if err := store.Inspect(t.Context(), "lock.name", ""); err != nil {
			t.Errorf("left behind: %v", err)
		}
	})
}

// A process goes on asking for those in line while one after another of them is served: that its
// questions are answered with the lock does not tell the Store that the others live.
func TestBeatsWhileServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		var refused atomic.Int32
		h := acquire(t, other, "name")
		var waiting sync.WaitGroup
		for i := range 80 { // in turns, so that each hand-over is between processes
			from := []*lock.Locker{l, other}[i%2]
			waiting.Go(func() {
				h := acquire(t, from, "name", lock.Wait(time.Hour), lock.Queue(40))
				time.Sleep(100 * time.Millisecond)
				release(t, h)
			})
			synctest.Wait()
		}
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			g, err := next()
			if err != nil {
				refused.Add(1)
			}
			return g, err
		})
		begin := time.Now()
		release(t, h)
		waiting.Wait()
		if n, want := refused.Load(), int32(time.Since(begin)/lock.Heartbeat)-2; n < want {
			t.Errorf("asked for those in line %d times, want %d at least", n, want)
		}
	})
}

// Who cannot wait where others do takes nothing from them: it does not ask for the lock, be it
// held here or elsewhere.
func TestNobodyAsksPastTheLine(t *testing.T) {
	for _, here := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			l, store := newLocker(t)
			holder := l
			if !here {
				holder = lock.New(store.Store, lock.Options{})
			}
			h := acquire(t, holder, "name")
			var waiting sync.WaitGroup
			var served []int
			waits(t, l, &waiting, &served, 0, lock.Queue(1))
			count := countAcquires(store)
			_, err := l.Acquire(t.Context(), "name")
			wantError(t, err, lock.ErrHeld)
			_, err = l.Acquire(t.Context(), "name", lock.Wait(time.Hour), lock.Queue(1))
			wantError(t, err, lock.ErrLineFull)
			if n := count(); n != 0 {
				t.Errorf("held here %v: asked %d times for the lock", here, n)
			}
			release(t, h)
			waiting.Wait()
		})
	}
}
