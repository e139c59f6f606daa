package lock_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

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

// While it looks, the one in the way fails: the lock is free by then.
func TestDeliveryIsFreeWhenItLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, store := newLocker(t)
		inspects := &inspected{faulty: store}
		l := lock.New(inspects, lock.Options{})
		h := acquire(t, l, "name", lock.Dedupe("x"))
		inspects.before = func() error { return h.Release(context.Background()) }
		release(t, acquire(t, l, "name", lock.Dedupe("x")))
	})
}

// inspected has something done before the Store is looked at.
type inspected struct {
	*faulty
	before func() error
}

func (s *inspected) Inspect(ctx context.Context, key string, token lock.Token) error {
	if err := s.before(); err != nil {
		return err
	}
	return s.faulty.Inspect(ctx, key, token)
}

// The Store is away, but that the same delivery runs is known here.
func TestDeliveryUnderWayInOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, store := newLocker(t)
		l := lock.New(&inspected{store, func() error { return errNoDial }}, lock.Options{})
		h := acquire(t, l, "name", lock.Dedupe("x"))
		store.onAcquire(refuseConnections)
		for delivery, want := range map[string]lock.Reason{"x": lock.SameDelivery, "y": lock.Held} {
			_, err := l.Acquire(t.Context(), "name", lock.Dedupe(delivery))
			wantError(t, err, lock.ErrHeld)
			wantReason(t, err, want)
			_, err = l.Acquire(t.Context(), "name", lock.Dedupe(delivery), lock.Wait(time.Second))
			wantError(t, err, lock.ErrTimeout)
			wantReason(t, err, want)
		}
		release(t, h)
	})
}

// A server that is out of memory cannot note what was handled, but frees the lock.
func TestReleaseWithoutMemory(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	c := lock.Claim{Token: newToken().Handling("x"), Lease: time.Hour, Done: time.Hour}
	_, err := store.Acquire(t.Context(), mainKey, c)
	wantError(t, err, nil)
	if err := server.Client.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	_, err = store.Release(t.Context(), mainKey, c)
	wantError(t, err, nil)
	if n := server.Client.Exists(t.Context(), mainKey).Val(); n != 0 {
		t.Error("the lock is still there")
	}
}
