package lock_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// logRenewals lets renewals through, and returns a function that says when they came.
func logRenewals(store *faulty) func() []time.Time {
	var times []time.Time
	store.onRenew(func(next func() (lock.Grant, error)) (lock.Grant, error) {
		store.mu.Lock()
		times = append(times, time.Now())
		store.mu.Unlock()
		return next()
	})
	return func() []time.Time {
		store.mu.Lock()
		defer store.mu.Unlock()
		return slices.Clone(times)
	}
}

func wantLost(t *testing.T, h *lock.Handle, why lock.Reason) {
	t.Helper()
	lost, ok := errors.AsType[*lock.LostError](context.Cause(h.Context()))
	if !ok || lost.Why != why {
		t.Errorf("the handle's context ended by %v, want lost (%s)", context.Cause(h.Context()), why)
	}
	wantError(t, h.Release(context.Background()), lock.ErrLost)
}

func TestRenewedWhileHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		times := logRenewals(store)
		h := acquire(t, l, "name", lock.Lease(9*time.Second))
		last := time.Now()
		time.Sleep(time.Hour)
		if h.Context().Err() != nil {
			t.Fatalf("lost: %v", context.Cause(h.Context()))
		}
		for _, renewed := range times() {
			if pause := renewed.Sub(last); pause > 3*time.Second || pause < 2500*time.Millisecond {
				t.Fatalf("renewed %v after the last time, want about a third of 9s", pause)
			}
			last = renewed
		}
		release(t, h)
		count := len(times())
		time.Sleep(time.Hour)
		if len(times()) != count {
			t.Error("renewed after the release")
		}
	})
}

func TestShortHoldIsNotRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		times := logRenewals(store)
		h := acquire(t, l, "name", lock.Lease(9*time.Second))
		time.Sleep(2 * time.Second)
		release(t, h)
		if len(times()) != 0 {
			t.Errorf("renewed at %v", times())
		}
	})
}

// Locks that were taken at about the same time are renewed at the same time.
func TestRenewalsKeepTheBeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		times := logRenewals(store)
		var handles []*lock.Handle
		for i := range 500 {
			handles = append(handles, acquire(t, l, string(rune(i)), lock.Lease(32*time.Second)))
			time.Sleep(4 * time.Millisecond) // 2s for all, 2 beats
		}
		time.Sleep(10500 * time.Millisecond)
		if n := len(times()); n != 500 {
			t.Errorf("%d renewals, want one for each of 500 locks", n)
		}
		if beats := slices.Compact(times()); len(beats) > 3 {
			t.Errorf("renewals at %d different times, want 3 at most", len(beats))
		}
		for _, h := range handles {
			release(t, h)
		}
	})
}

func TestLostByRenewal(t *testing.T) {
	for _, why := range []lock.Reason{lock.NotOwner, lock.MainGone, lock.MainChanged, lock.MainRewritten, lock.Expired} {
		t.Run(string(why), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, store := newLocker(t)
				store.onRenew(func(func() (lock.Grant, error)) (lock.Grant, error) {
					return lock.Grant{}, &lock.LostError{Why: why}
				})
				t0 := time.Now()
				h := acquire(t, l, "name")
				<-h.Context().Done()
				if after := time.Since(t0); after > 10*time.Second {
					t.Errorf("noticed after %v, want with the first renewal", after)
				}
				wantLost(t, h, why)
			})
		})
	}
}

// The Store is away for part of a lease: no harm. For longer: lost at the deadline, to the tick.
func TestRenewalWithoutAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, l, "name", lock.Lease(30*time.Second))
		store.onRenew(noRenewal)
		time.Sleep(28 * time.Second)
		store.onRenew(nil)
		time.Sleep(time.Minute)
		if h.Context().Err() != nil {
			t.Fatalf("lost although renewed in time: %v", context.Cause(h.Context()))
		}
		store.onRenew(noRenewal)
		deadline := h.Deadline()
		<-h.Context().Done()
		if !time.Now().Equal(deadline) {
			t.Errorf("lost at %v, deadline %v", time.Now(), deadline)
		}
		store.onRenew(nil)
		wantLost(t, h, lock.Expired)
	})
}

// A renewal that is answered after the deadline does not revive the lock.
func TestLateRenewalDoesNotRevive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onRenew(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			g, err := next()
			time.Sleep(time.Minute)
			return g, err
		})
		h := acquire(t, l, "name", lock.Lease(6*time.Second))
		deadline := h.Deadline()
		<-h.Context().Done()
		if !time.Now().Equal(deadline) {
			t.Errorf("lost at %v, deadline %v", time.Now(), deadline)
		}
		time.Sleep(2 * time.Minute)
		wantLost(t, h, lock.Expired)
	})
}

// The deadline counts from before a renewal was sent, not from its answer.
func TestSlowRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		sent := make(chan time.Time, 1)
		store.onRenew(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			sent <- time.Now()
			g, err := next()
			time.Sleep(time.Second)
			return g, err
		})
		h := acquire(t, l, "name", lock.Lease(6*time.Second))
		time.Sleep(3500 * time.Millisecond) // the first renewal was answered, the second is not yet sent
		if d := h.Deadline().Sub(<-sent); d >= 6*time.Second || d < 5*time.Second {
			t.Errorf("deadline %v after the renewal was sent, want a little less than the lease of 6s", d)
		}
		release(t, h)
	})
}

func TestStopRenewing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		times := logRenewals(store)
		h := acquire(t, l, "name", lock.Lease(30*time.Second))
		h.StopRenewing()
		deadline := h.Deadline()
		<-h.Context().Done()
		if !time.Now().Equal(deadline) || len(times()) != 0 {
			t.Errorf("lost at %v, deadline %v, renewed at %v", time.Now(), deadline, times())
		}
		wantLost(t, h, lock.Expired)
	})
}

// An outage is reported once, and so is its end; meanwhile newcomers share one time-out.
func TestOutageIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &faulty{Store: lock.NewMemory()}
		var outages []error
		var recoveries []time.Duration
		l := lock.New(store, lock.Options{
			OnOutage:   func(err error) { outages = append(outages, err) },
			OnRecovery: func(d time.Duration) { recoveries = append(recoveries, d) },
		})
		var asked atomic.Int32
		hang := func(func() (lock.Grant, error)) (lock.Grant, error) {
			asked.Add(1)
			time.Sleep(lock.DefaultOpTimeout)
			return lock.Grant{}, errNoDial
		}
		store.onAcquire(hang)
		begin := time.Now()
		type result struct {
			took time.Duration
			err  error
		}
		results := make(chan result, 100)
		newcomer := func(name string) {
			arrived := time.Now()
			h, err := l.Acquire(t.Context(), name, lock.Wait(time.Hour))
			if err == nil {
				release(t, h)
			}
			results <- result{time.Since(arrived), err}
		}
		for i := range 100 { // one every 100ms, each with a name of its own
			go newcomer(string(rune('a' + i)))
			time.Sleep(100 * time.Millisecond)
		}
		for range 100 {
			r := <-results
			wantError(t, r.err, lock.ErrUnavailable)
			if r.took > lock.DefaultOpTimeout {
				t.Errorf("a newcomer was answered after %v, want within %v", r.took, lock.DefaultOpTimeout)
			}
		}
		// Those of the first 2s, when nobody knew; then one at a time.
		if n := asked.Load(); n > 20+6 {
			t.Errorf("the Store was asked %d times during the outage", n)
		}
		if len(outages) != 1 || len(recoveries) != 0 {
			t.Errorf("outages %v, recoveries %v; want one outage", outages, recoveries)
		}
		store.onAcquire(nil)
		go newcomer("back")
		if r := <-results; r.err != nil || r.took != 0 {
			t.Errorf("after the outage: %+v", r)
		}
		if len(recoveries) != 1 || recoveries[0] != time.Since(begin)-lock.DefaultOpTimeout {
			t.Errorf("recoveries %v, want one after %v", recoveries, time.Since(begin)-lock.DefaultOpTimeout)
		}
	})
}

// The Store comes back while newcomers wait for the one who asks: all of them go on.
func TestRecoveryIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) { return lock.Grant{}, errNoDial })
		_, err := l.Acquire(t.Context(), "first")
		wantError(t, err, lock.ErrUnavailable)
		answer := make(chan struct{})
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			<-answer
			return next()
		})
		done := make(chan struct{})
		for i := range 10 {
			go func() {
				release(t, acquire(t, l, string(rune('a'+i))))
				done <- struct{}{}
			}()
		}
		synctest.Wait()
		close(answer)
		for range 10 {
			<-done
		}
	})
}

// A Store that was away may have lost locks: their holders do not wait for the next renewal to
// find out.
func TestRenewedAfterOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		old := acquire(t, l, "old", lock.Lease(time.Hour))
		time.Sleep(10*time.Second + time.Millisecond) // it has been renewed
		young := acquire(t, l, "young", lock.Lease(time.Hour))
		store.onRenew(noRenewal)
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) { return lock.Grant{}, errNoDial })
		_, err := l.Acquire(t.Context(), "other")
		wantError(t, err, lock.ErrUnavailable)
		store.onAcquire(nil)
		synctest.Wait()
		times := logRenewals(store)
		if err := store.ForceRelease(t.Context(), "lock.old"); err != nil {
			t.Fatal(err)
		}
		release(t, acquire(t, l, "other"))
		time.Sleep(1500 * time.Millisecond)
		if n := len(times()); n < 2 {
			t.Errorf("%d renewals soon after the outage, want one for each of 2 locks", n)
		}
		wantLost(t, old, lock.NotOwner)
		release(t, young)
	})
}

// sharded is a Store of which each key is a shard.
type sharded struct{ *faulty }

func (sharded) Shard(key string) string { return key }

// movable is a Store of one shard, which may become another one.
type movable struct {
	*faulty
	shard string
}

func (s *movable) Shard(string) string { return s.shard }

// A server dies and another one takes over, without a lock: its holder does not wait for anybody
// else to ask.
func TestLostByTakeover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &movable{faulty: &faulty{Store: lock.NewMemory()}, shard: "one"}
		l := lock.New(store, lock.Options{})
		h := acquire(t, l, "name", lock.Lease(time.Hour))
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) { return lock.Grant{}, errNoDial })
		store.onRenew(noRenewal)
		_, err := l.Acquire(t.Context(), "other")
		wantError(t, err, lock.ErrUnavailable)
		synctest.Wait()
		store.shard = "two"
		store.onRenew(nil)
		if err := store.ForceRelease(t.Context(), "lock.name"); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		<-h.Context().Done()
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("noticed after %v", took)
		}
		wantLost(t, h, lock.NotOwner)
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// One shard of the Store is away: nobody notices who wants a lock of another one.
func TestOutageOfOneShard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := sharded{&faulty{Store: lock.NewMemory()}}
		var outages, recoveries int
		l := lock.New(store, lock.Options{OnOutage: func(error) { outages++ }, OnRecovery: func(time.Duration) { recoveries++ }})
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) {
			time.Sleep(lock.DefaultOpTimeout)
			return lock.Grant{}, errNoDial
		})
		_, err := l.Acquire(t.Context(), "bad")
		wantError(t, err, lock.ErrUnavailable)
		asked := make(chan error)
		go func() {
			_, err := l.Acquire(t.Context(), "bad")
			asked <- err
		}()
		synctest.Wait() // it asks
		store.onAcquire(nil)
		begin := time.Now()
		release(t, acquire(t, l, "good"))
		if took := time.Since(begin); took != 0 {
			t.Errorf("the lock of another shard took %v", took)
		}
		wantError(t, <-asked, lock.ErrUnavailable)
		if outages != 1 || recoveries != 0 {
			t.Errorf("%d outages, %d recoveries", outages, recoveries)
		}
		release(t, acquire(t, l, "bad"))
		if recoveries != 1 {
			t.Errorf("%d recoveries, want one", recoveries)
		}
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A renewal of a short lease has less time than an operation: that it ran out says nothing about
// the Store.
func TestHastyRenewalIsNoOutage(t *testing.T) {
	for lease, want := range map[time.Duration]int{3 * time.Second: 0, time.Minute: 1} {
		synctest.Test(t, func(t *testing.T) {
			store := &faulty{Store: lock.NewMemory()}
			outages := 0
			l := lock.New(store, lock.Options{OnOutage: func(error) { outages++ }})
			store.onRenew(func(func() (lock.Grant, error)) (lock.Grant, error) {
				time.Sleep(min(lease/3, lock.DefaultOpTimeout))
				return lock.Grant{}, &lock.UnavailableError{Doubtful: true, Err: context.DeadlineExceeded}
			})
			h := acquire(t, l, "name", lock.Lease(lease))
			<-h.Context().Done()
			if outages != want {
				t.Errorf("%d outages with a lease of %v, want %d", outages, lease, want)
			}
			store.onRenew(nil)
			wantLost(t, h, lock.Expired)
			if err := l.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
