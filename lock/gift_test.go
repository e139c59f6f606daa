package lock_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// The lock goes to a waiter whose own question is still under way, and runs out before that is
// answered: the next one gets it, and the first waits on.
func TestGiftRunsOutUnopened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, l, "name")
		var served []int
		var waiting sync.WaitGroup
		for i := range 2 {
			waiting.Go(func() {
				h := acquire(t, l, "name", lock.Wait(time.Minute), lock.Lease(time.Second))
				served = append(served, i) // guarded by the lock
				if err := h.Release(context.Background()); err != nil {
					t.Errorf("release by %d: %v", i, err)
				}
			})
			synctest.Wait()
		}
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			store.onAcquire(nil)
			g, err := next()
			time.Sleep(1900 * time.Millisecond)
			return g, err
		})
		time.Sleep(lock.Heartbeat) // the first one asks
		synctest.Wait()
		release(t, h)
		time.Sleep(1100 * time.Millisecond)
		_, err := other.Acquire(t.Context(), "name") // by asking it hands over what has run out
		wantError(t, err, lock.ErrHeld)
		waiting.Wait()
		if len(served) != 2 || served[0] != 1 {
			t.Errorf("served %v, want 1 and then 0", served)
		}
	})
}

// The lock goes to a waiter while its own question is on its way, whose answer then is too old: it
// has the lock once, and is in line no more.
func TestGiftOvertakesQuestion(t *testing.T) {
	for i := range 20 { // which of the two it sees first is a matter of chance
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, store := newLocker(t)
				h := acquire(t, l, "name")
				var waiting sync.WaitGroup
				wait := func() {
					waiting.Go(func() {
						h := acquire(t, l, "name", lock.Wait(time.Minute), lock.Lease(time.Second))
						time.Sleep(100 * time.Millisecond)
						if err := h.Release(context.Background()); err != nil {
							t.Errorf("release: %v", err)
						}
					})
					synctest.Wait()
				}
				wait()
				dead := lock.Claim{Token: newToken(), Lease: time.Second, Wait: true}
				if _, err := store.Store.Acquire(t.Context(), "lock.name", dead); err == nil {
					t.Fatal("not held")
				}
				wait()
				store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
					store.onAcquire(nil)
					time.Sleep(1200 * time.Millisecond)
					return next()
				})
				time.Sleep(lock.Heartbeat + time.Second) // it has asked
				release(t, h)
				waiting.Wait() // the last one asks when the lease of the dead one has passed
			})
		})
	}
}
