package lock_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// handled takes the lock for a delivery, and gives it back when that was handled well.
func handled(t *testing.T, l *lock.Locker, delivery string) {
	t.Helper()
	h := acquire(t, l, "name", lock.Dedupe(delivery))
	h.Done(time.Hour)
	release(t, h)
}

// wantReason fails unless err is contention for this reason.
func wantReason(t *testing.T, err error, want lock.Reason) {
	t.Helper()
	var why lock.Reason
	if held, ok := errors.AsType[*lock.HeldError](err); ok {
		why = held.Why
	} else if full, ok := errors.AsType[*lock.LineFullError](err); ok {
		why = full.Why
	} else if timeout, ok := errors.AsType[*lock.TimeoutError](err); ok {
		why = timeout.Why
	}
	if why != want {
		t.Errorf("%v (%s), want %s", err, why, want)
	}
}

func TestDeliveryIsHandledOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := newLocker(t)
		release(t, acquire(t, l, "name", lock.Dedupe("x"))) // not well
		handled(t, l, "x")
		_, err := l.Acquire(t.Context(), "name", lock.Dedupe("x"))
		wantError(t, err, lock.ErrDone)
		for _, options := range [][]lock.AcquireOption{{lock.Dedupe("y")}, {lock.Dedupe("")}, {}} {
			release(t, acquire(t, l, "name", options...))
		}
		release(t, acquire(t, l, "another", lock.Dedupe("x")))
		time.Sleep(time.Hour)
		handled(t, l, "x")
	})
}

// That a delivery was handled is heard whatever is in the way: a holder, a line that is full.
func TestHandledDeliveryNeedsNoLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := newLocker(t)
		handled(t, l, "x")
		h := acquire(t, l, "name")
		_, err := l.Acquire(t.Context(), "name", lock.Dedupe("x"))
		wantError(t, err, lock.ErrDone)
		_, err = l.Acquire(t.Context(), "name", lock.Dedupe("x"), lock.Wait(time.Minute))
		wantError(t, err, lock.ErrDone)
		var waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 0)
		_, err = l.Acquire(t.Context(), "name", lock.Dedupe("x"), lock.Wait(time.Minute), lock.Queue(1))
		wantError(t, err, lock.ErrDone)
		release(t, h)
		waiting.Wait()
	})
}

func TestDeliveryUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, l, "name", lock.Dedupe("x"))
		for _, l := range []*lock.Locker{l, other} {
			for delivery, want := range map[string]lock.Reason{"x": lock.SameDelivery, "y": lock.Held} {
				_, err := l.Acquire(t.Context(), "name", lock.Dedupe(delivery))
				wantError(t, err, lock.ErrHeld)
				wantReason(t, err, want)
				_, err = l.Acquire(t.Context(), "name", lock.Dedupe(delivery), lock.Wait(time.Second))
				wantError(t, err, lock.ErrTimeout)
				wantReason(t, err, want)
				_, err = l.Acquire(t.Context(), "name", lock.Dedupe(delivery), lock.Wait(time.Second), lock.Queue(0))
				wantError(t, err, lock.ErrLineFull)
				wantReason(t, err, want)
			}
		}
		release(t, h)
	})
}

// Which delivery is under way is what counts when the wait runs out.
func TestDeliveryFailsWhileTheSameWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := newLocker(t)
		h := acquire(t, l, "name", lock.Dedupe("x"))
		var waiting sync.WaitGroup
		waiting.Go(func() {
			next := acquire(t, l, "name", lock.Wait(time.Minute), lock.Dedupe("y"))
			time.Sleep(time.Minute)
			release(t, next)
		})
		synctest.Wait()
		waiting.Go(func() {
			_, err := l.Acquire(t.Context(), "name", lock.Wait(30*time.Second), lock.Dedupe("x"))
			wantError(t, err, lock.ErrTimeout)
			wantReason(t, err, lock.Held)
		})
		synctest.Wait()
		release(t, h)
		waiting.Wait()
	})
}

// The same delivery waits while it is handled: if that failed it is its turn, and otherwise there is
// nothing to do, and the next one's turn.
func TestDeliveryWaitsForItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := newLocker(t)
		h := acquire(t, l, "name", lock.Dedupe("x"))
		var waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 1, lock.Dedupe("y"))
		waits(t, l, &waiting, &served, 2, lock.Dedupe("x"))
		release(t, h)
		waiting.Wait()
		if len(served) != 2 {
			t.Fatalf("served %v, want both", served)
		}
		h = acquire(t, l, "name", lock.Dedupe("x"))
		waiting.Go(func() {
			_, err := l.Acquire(t.Context(), "name", lock.Dedupe("x"), lock.Wait(time.Minute))
			wantError(t, err, lock.ErrDone)
		})
		synctest.Wait()
		waits(t, l, &waiting, &served, 3, lock.Dedupe("z"))
		begin := time.Now()
		h.Done(time.Hour)
		release(t, h)
		waiting.Wait()
		if waited := time.Since(begin); waited != 0 {
			t.Errorf("those in line heard of it after %v, want at once", waited)
		}
	})
}

// A holder that had lost the lock notes its delivery: one that waits hears of it when its wait runs
// out, at the latest.
func TestDeliveryIsHandledElsewhereWhileItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, l, "name")
		var waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 0) // asks for the next one, too
		waiting.Go(func() {
			_, err := l.Acquire(t.Context(), "name", lock.Dedupe("x"), lock.Wait(time.Second))
			wantError(t, err, lock.ErrDone)
		})
		synctest.Wait()
		_, err := store.Store.Release(t.Context(), "lock.name", lock.Claim{Token: newToken().Handling("x"), Done: time.Hour})
		wantError(t, err, lock.ErrLost)
		time.Sleep(time.Second)
		synctest.Wait()
		release(t, h)
		waiting.Wait()
	})
}

func TestHandledDeliveryIsNoted(t *testing.T) {
	for name, during := range map[string]func(t *testing.T, store *faulty){
		"the lock was lost": func(t *testing.T, store *faulty) {
			if err := store.ForceRelease(t.Context(), "lock.name"); err != nil {
				t.Fatal(err)
			}
		},
		"the release goes unanswered": func(_ *testing.T, store *faulty) {
			failures := 0
			store.onRelease(func(next func() error) error {
				if failures++; failures <= 3 {
					return errNoDial
				}
				return next()
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, store := newLocker(t)
				h := acquire(t, l, "name", lock.Dedupe("x"))
				during(t, store)
				h.Done(time.Hour)
				if err := h.Release(context.Background()); err == nil {
					t.Error("the release went as usual")
				}
				time.Sleep(10 * time.Second)
				_, err := l.Acquire(t.Context(), "name", lock.Dedupe("x"))
				wantError(t, err, lock.ErrDone)
			})
		})
	}
}

// displaced starts a waiter that is to be superseded.
func displaced(t *testing.T, l *lock.Locker, group *sync.WaitGroup, options ...lock.AcquireOption) {
	group.Go(func() {
		_, err := l.Acquire(t.Context(), "name", append([]lock.AcquireOption{lock.Wait(time.Hour), lock.Supersede()}, options...)...)
		wantError(t, err, lock.ErrSuperseded)
	})
}

func TestNewestWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, l, "name", lock.Lease(time.Hour), lock.Supersede())
		var old, waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 1)
		for i := range 9 {
			displaced(t, []*lock.Locker{l, other}[i%2], &old, lock.Queue(2))
			synctest.Wait()
		}
		waits(t, l, &waiting, &served, 2, lock.Supersede(), lock.Queue(2))
		begin := time.Now()
		old.Wait()
		if waited := time.Since(begin); waited != 0 {
			t.Errorf("those that were displaced heard of it after %v, want at once", waited)
		}
		release(t, h)
		waiting.Wait()
		if len(served) != 2 || served[1] != 2 {
			t.Errorf("served %v, want the one that supersedes nobody, and the newest", served)
		}
	})
}

// While the Store is away all of them wait. Who is the newest does not depend on who asks first then.
func TestNewestWinsAfterOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 100 {
			l, store := newLocker(t)
			h := acquire(t, l, "name", lock.Lease(time.Hour))
			store.onAcquire(refuseConnections)
			var old, waiting sync.WaitGroup
			var served []int
			for range 3 {
				displaced(t, l, &old)
				time.Sleep(time.Second)
			}
			waits(t, l, &waiting, &served, 1, lock.Supersede())
			store.onAcquire(nil)
			release(t, acquire(t, l, "another")) // the Store is back
			old.Wait()
			release(t, h)
			waiting.Wait()
		}
	})
}

// Nobody counts as older or newer by when the Store hears of it, or how often.
func TestOlderDisplacesNobody(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	came := time.Now()
	newClaim := func(after time.Duration) lock.Claim {
		return lock.Claim{Token: newToken().Superseding(), Lease: time.Hour, Wait: true, Since: came.Add(after - time.Minute)}
	}
	want := func(c lock.Claim, want error) {
		t.Helper()
		_, err := store.Acquire(t.Context(), mainKey, c)
		wantError(t, err, want)
	}
	holder, older, old, newest := newClaim(0), newClaim(1*time.Second), newClaim(2*time.Second), newClaim(3*time.Second)
	want(holder, nil)
	want(old, lock.ErrHeld)
	want(old, lock.ErrHeld) // its answer was lost: it does not know its place
	want(newest, lock.ErrHeld)
	want(old, lock.ErrSuperseded)
	want(older, lock.ErrSuperseded)
	_, err := store.Release(t.Context(), mainKey, holder)
	wantError(t, err, nil)
	want(newest, nil)
	_, err = store.Release(t.Context(), mainKey, newest)
	wantError(t, err, nil)
	want(older, lock.ErrSuperseded) // the lock is free, and a newer one had it
	last := newClaim(4 * time.Second)
	want(last, nil) // at once, without having stood in line
	_, err = store.Release(t.Context(), mainKey, last)
	wantError(t, err, nil)
	want(newClaim(3500*time.Millisecond), lock.ErrSuperseded)
}

// The Store hands the lock to one that has been superseded meanwhile: it does not start, and the
// newest gets it.
func TestSupersededWhileItAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, other, "name", lock.Lease(time.Hour))
		var old, waiting sync.WaitGroup
		displaced(t, l, &old)
		synctest.Wait()
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			store.onAcquire(nil)
			release(t, h)
			defer time.Sleep(10 * time.Second) // a slow answer
			return next()
		})
		time.Sleep(lock.Heartbeat + time.Second)
		var served []int
		waits(t, l, &waiting, &served, 1, lock.Supersede())
		old.Wait()
		waiting.Wait()
	})
}

func TestNewestWinsAcrossProcesses(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(t *testing.T) (open func() lock.Store, client *redis.Client){
		"one server": func(t *testing.T) (func() lock.Store, *redis.Client) {
			server := redistest.Start(t)
			return over(t, lock.NewGetSet, clientOptions(server.Addr)), server.Client
		},
		"cluster": func(t *testing.T) (func() lock.Store, *redis.Client) {
			cluster := redistest.StartCluster(t)
			return overCluster(t, cluster), cluster.MasterOf(t, "lock.name").Client
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			open, client := start(t)
			here, there := lock.New(open(), lock.Options{}), lock.New(open(), lock.Options{})
			h := acquire(t, here, "name", lock.Supersede())
			var waiting sync.WaitGroup
			inLine := ""
			next := func() { // waits until another one stands in line than before
				t.Helper()
				before := inLine
				await(t, "the newest to stand in line, and no other", func() bool {
					line := client.ZRange(t.Context(), "{lock.name}:line", 0, -1).Val()
					if len(line) == 1 {
						inLine = line[0]
					}
					return inLine != before
				})
			}
			for _, l := range []*lock.Locker{there, here, there, there, here} {
				displaced(t, l, &waiting)
				next()
			}
			waiting.Go(func() {
				release(t, acquire(t, there, "name", lock.Wait(time.Hour), lock.Supersede()))
			})
			next()
			release(t, h)
			waiting.Wait()
			closeAll(t, here, there)
		})
	}
}

func TestQuorumHasNoDeliveries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := lock.New(lock.NewQuorum(lock.Node{Store: lock.NewMemory()}), lock.Options{})
		for _, option := range []lock.AcquireOption{lock.Dedupe("x"), lock.Supersede()} {
			if _, err := l.Acquire(t.Context(), "name", option, lock.Wait(time.Second)); err == nil || errors.Is(err, lock.ErrUnavailable) {
				t.Errorf("acquire: %v, want an error that says so", err)
			}
		}
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

// In Redis a hand-over inside the process comes with no message: the answer to the release is all there is.
func TestDeliveryWaitsForItselfInRedis(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	l := newLockers(t, server, 1)[0]
	h := acquire(t, l, "name", lock.Dedupe("x"))
	var waiting sync.WaitGroup
	waiting.Go(func() {
		_, err := l.Acquire(t.Context(), "name", lock.Dedupe("x"), lock.Wait(time.Hour))
		wantError(t, err, lock.ErrDone)
	})
	inLine(t, server, 1)
	h.Done(time.Hour)
	release(t, h)
	waiting.Wait()
	closeAll(t, l)
}

// An attempt whose answer is lost takes the lock; asked again, the Store says that the delivery was handled
// meanwhile: the lock does not stay behind.
func TestHandledWhileAnswerWasLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			store.onAcquire(nil)
			if _, err := next(); err != nil {
				t.Error(err)
			}
			late := lock.Claim{Token: newToken().Handling("x"), Done: time.Hour}
			_, err := store.Store.Release(t.Context(), "lock.name", late)
			wantError(t, err, lock.ErrLost)
			return next()
		})
		_, err := l.Acquire(t.Context(), "name", lock.Dedupe("x"))
		wantError(t, err, lock.ErrDone)
		release(t, acquire(t, l, "name"))
	})
}

// A holder that is gone handles nothing, whoever has its key by now.
func TestForeignHolderHandlesNoDelivery(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	server.Client.HSet(t.Context(), holderKey, "t", string(newToken().Handling("x")), "e", 1)
	server.Client.Set(t.Context(), mainKey, time.Now().Add(time.Hour).Unix(), 0)
	token := newToken().Handling("x")
	_, acquire := store.Acquire(t.Context(), mainKey, lock.Claim{Token: token, Lease: time.Hour})
	for _, err := range []error{acquire, store.Inspect(t.Context(), mainKey, token)} {
		wantReason(t, err, lock.ForeignHolder)
	}
}
