package lock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// faulty is a Store between the Locker and a real one, for tests of what the network does.
type faulty struct {
	lock.Store
	mu      sync.Mutex
	ask     func(next func() (lock.Grant, error)) (lock.Grant, error) // nil: as it comes
	give    func(next func() error) error
	prolong func(next func() (lock.Grant, error)) (lock.Grant, error)
	closed  atomic.Bool
}

// onAcquire has f answer from now on; next asks the real Store.
func (s *faulty) onAcquire(f func(next func() (lock.Grant, error)) (lock.Grant, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ask = f
}

func (s *faulty) onRelease(f func(next func() error) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.give = f
}

func (s *faulty) onRenew(f func(next func() (lock.Grant, error)) (lock.Grant, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.prolong = f
}

func (s *faulty) Renew(ctx context.Context, key string, claim lock.Claim) (lock.Grant, error) {
	next := func() (lock.Grant, error) { return s.Store.Renew(ctx, key, claim) }
	s.mu.Lock()
	prolong := s.prolong
	s.mu.Unlock()
	if prolong != nil {
		return prolong(next)
	}
	return next()
}

func (s *faulty) Acquire(ctx context.Context, key string, claim lock.Claim) (lock.Grant, error) {
	next := func() (lock.Grant, error) { return s.Store.Acquire(ctx, key, claim) }
	s.mu.Lock()
	ask := s.ask
	s.mu.Unlock()
	if ask != nil {
		return ask(next)
	}
	return next()
}

func (s *faulty) Release(ctx context.Context, key string, claim lock.Claim) (next lock.Successor, err error) {
	release := func() error {
		next, err = s.Store.Release(ctx, key, claim)
		return err
	}
	s.mu.Lock()
	give := s.give
	s.mu.Unlock()
	if give == nil {
		give = func(next func() error) error { return next() }
	}
	if err := give(release); err != nil {
		return lock.Successor{}, err
	}
	return next, nil
}

func (s *faulty) Close() error {
	s.closed.Store(true)
	return s.Store.Close()
}

// newToken returns a token of a process of its own.
func newToken() lock.Token { return lock.NewProcess().NewToken() }

// giveBack releases what somebody holds who did not wait for it.
func giveBack(t *testing.T, store lock.Store, key string, token lock.Token) error {
	t.Helper()
	_, err := store.Release(t.Context(), key, lock.Claim{Token: token})
	return err
}

var (
	errNoReply = &lock.UnavailableError{Doubtful: true, Err: errors.New("no reply")}
	errNoDial  = &lock.UnavailableError{Err: errors.New("connection refused")}
)

func noRenewal(func() (lock.Grant, error)) (lock.Grant, error) { return lock.Grant{}, errNoReply }

// newLocker returns a Locker over a memory Store of its own, and joins all it started when the
// test ends.
func newLocker(t *testing.T) (*lock.Locker, *faulty) {
	store := &faulty{Store: lock.NewMemory()}
	l := lock.New(store, lock.Options{})
	t.Cleanup(func() {
		if err := l.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return l, store
}

func acquire(t *testing.T, l *lock.Locker, name string, options ...lock.AcquireOption) *lock.Handle {
	t.Helper()
	h, err := l.Acquire(t.Context(), name, options...)
	if err != nil {
		t.Fatalf("acquire: %v", err)
	}
	return h
}

func release(t *testing.T, h *lock.Handle) {
	t.Helper()
	if err := h.Release(context.Background()); err != nil {
		t.Errorf("release: %v", err)
	}
}

// kinds are the errors that must never stand for one another.
var kinds = []error{lock.ErrHeld, lock.ErrTimeout, lock.ErrLineFull, lock.ErrDone, lock.ErrSuperseded, lock.ErrLost, lock.ErrUnavailable, context.Canceled}

func wantError(t *testing.T, err, want error) {
	t.Helper()
	for _, kind := range kinds {
		if got := errors.Is(err, kind); got != (kind == want) {
			t.Errorf("errors.Is(%v, %q) is %v", err, kind, got)
		}
	}
}

func TestContention(t *testing.T) {
	l, _ := newLocker(t)
	h := acquire(t, l, "name")
	_, err := l.Acquire(t.Context(), "name")
	wantError(t, err, lock.ErrHeld)
	acquireOther := acquire(t, l, "other")
	release(t, acquireOther)
	release(t, h)
	release(t, acquire(t, l, "name"))
}

func TestHeldByAnotherLocker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, other, "name")
		_, err := l.Acquire(t.Context(), "name")
		wantError(t, err, lock.ErrHeld)
		_, err = l.Acquire(t.Context(), "name", lock.Wait(10*time.Second))
		wantError(t, err, lock.ErrTimeout)

		done := make(chan struct{})
		go func() {
			defer close(done)
			release(t, acquire(t, l, "name", lock.Wait(10*time.Second)))
		}()
		synctest.Wait()
		release(t, h)
		<-done
	})
}

func TestWaitRunsOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := newLocker(t)
		h := acquire(t, l, "name")
		begin := time.Now()
		_, err := l.Acquire(t.Context(), "name", lock.Wait(5*time.Second))
		wantError(t, err, lock.ErrTimeout)
		if waited := time.Since(begin); waited != 5*time.Second {
			t.Errorf("waited %v, want 5s", waited)
		}
		release(t, h)
	})
}

func TestLineIsFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := newLocker(t)
		h := acquire(t, l, "name")
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() { release(t, acquire(t, l, "name", lock.Wait(time.Minute), lock.Queue(3))) })
		}
		synctest.Wait()
		_, err := l.Acquire(t.Context(), "name", lock.Wait(time.Minute), lock.Queue(3))
		wantError(t, err, lock.ErrLineFull)
		_, err = l.Acquire(t.Context(), "name")
		wantError(t, err, lock.ErrHeld)
		release(t, h)
		waiting.Wait()
	})
}

func TestFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := newLocker(t)
		const waiters = 100
		h := acquire(t, l, "name")
		var served []int
		var waiting sync.WaitGroup
		for i := range waiters {
			waiting.Go(func() {
				h := acquire(t, l, "name", lock.Wait(time.Hour), lock.Queue(waiters))
				served = append(served, i) // guarded by the lock itself
				time.Sleep(time.Second)
				release(t, h)
			})
			synctest.Wait() // i is in line before the next one comes
		}
		release(t, h)
		waiting.Wait()
		for i := range served {
			if served[i] != i {
				t.Fatalf("served in the order %v", served)
			}
		}
		if len(served) != waiters {
			t.Errorf("%d of %d were served", len(served), waiters)
		}
	})
}

func TestWaiterThatLeavesIsNotServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := newLocker(t)
		h := acquire(t, l, "name")
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan error)
		go func() {
			_, err := l.Acquire(ctx, "name", lock.Wait(time.Hour))
			left <- err
		}()
		synctest.Wait()
		leave()
		wantError(t, <-left, context.Canceled)
		release(t, h)
		release(t, acquire(t, l, "name"))
	})
}

// A caller that leaves while the Store is answering gets no lock, and leaves none behind.
func TestCallerLeavesDuringAttempt(t *testing.T) {
	l, store := newLocker(t)
	ctx, leave := context.WithCancel(t.Context())
	store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
		leave()
		store.onAcquire(nil)
		return next()
	})
	_, err := l.Acquire(ctx, "name")
	wantError(t, err, context.Canceled)
	release(t, acquire(t, l, "name"))
	_, err = l.Acquire(ctx, "name")
	wantError(t, err, context.Canceled)
}

func TestHandleIsContextWithDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onRenew(noRenewal)
		type ctxKey struct{}
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), ctxKey{}, "value"))
		t0 := time.Now()
		h, err := l.Acquire(ctx, "name", lock.Lease(10*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		synctest.Wait()
		if h.Context().Err() != nil {
			t.Error("the handle ended with the context of its Acquire")
		}
		if h.Context().Value(ctxKey{}) != "value" {
			t.Error("the handle's context lost the values of the Acquire's")
		}
		if h.Fence() <= 0 {
			t.Errorf("fence %d", h.Fence())
		}
		if d := h.Deadline().Sub(t0); d <= 9*time.Second || d >= 10*time.Second {
			t.Errorf("deadline %v after the acquire, want a little less than the lease of 10s", d)
		}

		<-h.Context().Done()
		if !time.Now().Equal(h.Deadline()) {
			t.Errorf("context ended at %v, deadline %v", time.Now(), h.Deadline())
		}
		wantError(t, context.Cause(h.Context()), lock.ErrLost)
		// It ends before anybody else can have it.
		if _, err := store.Store.Acquire(t.Context(), "lock.name", lock.Claim{Token: "other", Lease: time.Second}); !errors.Is(err, lock.ErrHeld) {
			t.Errorf("another could have the lock before its holder knew: %v", err)
		}
		wantError(t, h.Release(context.Background()), lock.ErrLost)
		release(t, acquire(t, l, "name"))
	})
}

// The deadline counts from before the question: the time that an answer takes is not ours.
func TestSlowAnswerShortensDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onRenew(noRenewal)
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			g, err := next()
			time.Sleep(1500 * time.Millisecond)
			return g, err
		})
		t0 := time.Now()
		h := acquire(t, l, "name", lock.Lease(2*time.Second))
		store.onAcquire(nil)
		if d := h.Deadline().Sub(t0); d >= 2*time.Second {
			t.Errorf("deadline %v after asking, want less than the lease of 2s", d)
		}
		release(t, h)
	})
}

func TestReleaseEndsContext(t *testing.T) {
	l, _ := newLocker(t)
	h := acquire(t, l, "name")
	release(t, h)
	if cause := context.Cause(h.Context()); !errors.Is(cause, lock.ErrReleased) {
		t.Errorf("cause %v, want released", cause)
	}
	next := acquire(t, l, "name")
	release(t, h) // again: no effect on the next holder
	_, err := l.Acquire(t.Context(), "name")
	wantError(t, err, lock.ErrHeld)
	release(t, next)
}

func TestStoreUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) { return lock.Grant{}, errNoDial })
		_, err := l.Acquire(t.Context(), "name")
		wantError(t, err, lock.ErrUnavailable)
		// A newcomer does not wait for a Store that is away.
		begin := time.Now()
		_, err = l.Acquire(t.Context(), "name", lock.Wait(time.Hour))
		wantError(t, err, lock.ErrUnavailable)
		if waited := time.Since(begin); waited != 0 {
			t.Errorf("a newcomer waited %v", waited)
		}
		store.onAcquire(nil)
		release(t, acquire(t, l, "name"))
	})
}

// While the first one's question is under way nobody knows whether the lock is held or the
// Store away: the others hear it from the Store, too, and not "held" by guess.
func TestNobodyGuesses(t *testing.T) {
	for _, c := range []struct {
		name         string
		answer       func(next func() (lock.Grant, error)) (lock.Grant, error)
		taken        int
		alone, queue error // for those without patience, and with no place to wait in
	}{
		{"away", func(func() (lock.Grant, error)) (lock.Grant, error) { return lock.Grant{}, errNoDial },
			0, lock.ErrUnavailable, lock.ErrUnavailable},
		{"held", func(func() (lock.Grant, error)) (lock.Grant, error) {
			return lock.Grant{}, &lock.HeldError{Why: lock.Held}
		}, 0, lock.ErrHeld, lock.ErrLineFull},
		{"free", func(next func() (lock.Grant, error)) (lock.Grant, error) { return next() },
			1, lock.ErrHeld, lock.ErrLineFull},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, store := newLocker(t)
				answer := make(chan struct{})
				store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
					<-answer
					return c.answer(next)
				})
				var callers sync.WaitGroup
				var taken atomic.Int32
				for i := range 9 {
					options, want := []lock.AcquireOption{}, c.alone
					if i%3 == 2 {
						options, want = []lock.AcquireOption{lock.Wait(time.Minute), lock.Queue(0)}, c.queue
					}
					callers.Go(func() {
						h, err := l.Acquire(t.Context(), "name", options...)
						if err != nil {
							wantError(t, err, want)
							return
						}
						taken.Add(1)
						time.Sleep(time.Second)
						release(t, h)
					})
				}
				synctest.Wait()
				close(answer)
				callers.Wait()
				if n := int(taken.Load()); n != c.taken {
					t.Errorf("%d callers got the lock, want %d", n, c.taken)
				}
			})
		})
	}
}

// Who stands in line keeps the place while the Store is away, until the wait ends.
func TestWaitersOutlastAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, other, "name")
		var away atomic.Bool
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			if away.Load() {
				time.Sleep(2 * time.Second) // as long as an operation may take
				return lock.Grant{}, errNoReply
			}
			return next()
		})
		store.onRelease(func(next func() error) error {
			if away.Load() {
				return errNoReply
			}
			return next()
		})
		var waiters sync.WaitGroup
		for range 2 {
			waiters.Go(func() { release(t, acquire(t, l, "name", lock.Wait(time.Minute))) })
			waiters.Go(func() {
				_, err := l.Acquire(t.Context(), "name", lock.Wait(5*time.Second))
				wantError(t, err, lock.ErrUnavailable)
			})
		}
		time.Sleep(time.Second)
		away.Store(true)
		time.Sleep(10 * time.Second)
		away.Store(false)
		release(t, h)
		waiters.Wait()
	})
}

// The Store granted the lock, but the answer got lost: no lock stays behind, and this
// process's next attempt does not meet it either.
func TestLostAcquireReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			store.onAcquire(nil)
			if _, err := next(); err != nil {
				t.Error(err)
			}
			return lock.Grant{}, errNoReply
		})
		_, err := l.Acquire(t.Context(), "name")
		wantError(t, err, lock.ErrUnavailable)
		h := acquire(t, l, "name")
		release(t, h)
		synctest.Wait()
		if err := store.Inspect(t.Context(), "lock.name", ""); err != nil {
			t.Errorf("the lock was left behind: %v", err)
		}
	})
}

// A caller that waits asks again by the same token, and gets the lock that it has already.
func TestLostAcquireReplyOfWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, other, "name")
		asked := 0
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			if asked++; asked == 1 {
				_, err := next()
				release(t, h)
				return lock.Grant{}, err
			}
			g, err := next()
			if asked == 2 {
				return lock.Grant{}, errNoReply
			}
			return g, err
		})
		release(t, acquire(t, l, "name", lock.Wait(time.Minute)))
		if asked != 3 {
			t.Errorf("asked %d times, want 3", asked)
		}
	})
}

// A release without an answer goes on in the background; this process's next attempt does not
// wait for the lease.
func TestReleaseGoesOnInBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		var failures atomic.Int32
		store.onRelease(func(next func() error) error {
			if failures.Add(1) <= 5 {
				return errNoReply
			}
			return next()
		})
		h := acquire(t, l, "name", lock.Lease(24*time.Hour))
		wantError(t, h.Release(context.Background()), lock.ErrUnavailable)
		_, err := l.Acquire(t.Context(), "name")
		if err != nil {
			wantError(t, err, lock.ErrUnavailable) // never "held": it is our own
		}
		time.Sleep(time.Minute)
		if err := store.Inspect(t.Context(), "lock.name", ""); err != nil {
			t.Errorf("the lock was left behind: %v", err)
		}
		release(t, acquire(t, l, "name"))
	})
}

// The background release gives up when the lease has passed in any case.
func TestBackgroundReleaseEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onRelease(func(func() error) error { return errNoReply })
		h := acquire(t, l, "name", lock.Lease(10*time.Second))
		begin := time.Now()
		wantError(t, h.Release(context.Background()), lock.ErrUnavailable)
		if err := l.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took < 10*time.Second || took > 15*time.Second {
			t.Errorf("gave up after %v, want a little more than the lease of 10s", took)
		}
	})
}

func TestOrLocal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) { return lock.Grant{}, errNoReply })
		store.onRelease(func(func() error) error { return errNoReply })
		h := acquire(t, l, "name", lock.OrLocal())
		if !h.Local() || h.Fence() != 0 || !h.Deadline().IsZero() {
			t.Errorf("local %v, fence %d, deadline %v", h.Local(), h.Fence(), h.Deadline())
		}
		// Inside this process the name stays one at a time.
		_, err := l.Acquire(t.Context(), "name", lock.OrLocal())
		wantError(t, err, lock.ErrHeld)
		waited := make(chan struct{})
		go func() {
			defer close(waited)
			release(t, acquire(t, l, "name", lock.OrLocal(), lock.Wait(time.Minute)))
		}()
		synctest.Wait()
		release(t, h)
		<-waited

		store.onAcquire(nil)
		store.onRelease(nil)
		h = acquire(t, l, "name", lock.OrLocal())
		if h.Local() {
			t.Error("the lock is local although the Store is back")
		}
		release(t, h)
	})
}

func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, l, "name")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := l.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("close while a lock is held: %v", err)
		}
		if store.closed.Load() {
			t.Error("the Store was closed while a lock is held")
		}
		_, err := l.Acquire(t.Context(), "other")
		wantError(t, err, lock.ErrUnavailable)
		release(t, h)
		synctest.Wait()
		if !store.closed.Load() {
			t.Error("the Store was not closed after the last release")
		}
	})
}

func TestBadOptions(t *testing.T) {
	l, _ := newLocker(t)
	for _, c := range []struct {
		option lock.AcquireOption
		names  string // the option that the error names
	}{
		{lock.Lease(0), "lease"},
		{lock.Lease(1500 * time.Millisecond), "lease"},
		{lock.Lease(25 * time.Hour), "lease"},
		{lock.Prefix(""), "prefix"},
		{lock.Prefix("{a}"), "prefix"},
		{lock.Prefix("a\n"), "prefix"},
	} {
		_, err := l.Acquire(t.Context(), "secret-name", c.option)
		if err == nil || !strings.HasPrefix(err.Error(), c.names+": ") {
			t.Errorf("error %v, want one about %s", err, c.names)
		}
	}
}

// Names are user input: no error has one in it.
func TestErrorsDoNotContainName(t *testing.T) {
	l, store := newLocker(t)
	h := acquire(t, l, "secret")
	var errs []error
	_, err := l.Acquire(t.Context(), "secret")
	errs = append(errs, err)
	_, err = l.Acquire(t.Context(), "secret", lock.Wait(time.Millisecond))
	errs = append(errs, err)
	_, err = l.Acquire(t.Context(), "secret", lock.Wait(time.Millisecond), lock.Queue(0))
	errs = append(errs, err)
	if err := store.ForceRelease(t.Context(), "lock.secret"); err != nil {
		t.Fatal(err)
	}
	errs = append(errs, h.Release(context.Background()))
	store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) { return lock.Grant{}, errNoDial })
	_, err = l.Acquire(t.Context(), "secret")
	errs = append(errs, err)
	for i, want := range []error{lock.ErrHeld, lock.ErrTimeout, lock.ErrLineFull, lock.ErrLost, lock.ErrUnavailable} {
		wantError(t, errs[i], want)
		if strings.Contains(errs[i].Error(), "secret") {
			t.Errorf("the name is in the error %q", errs[i])
		}
	}
}

// Many callers of several processes, here Lockers with connections of their own, on one real
// Redis: never two at a time, everybody is served, fences grow.
func TestExclusiveAcrossLockers(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	const lockers, callers, rounds = 3, 8, 10
	var running, overlaps, served atomic.Int32
	var lastFence atomic.Int64
	var wg sync.WaitGroup
	for range lockers {
		l := lock.New(openGetSet(t, server), lock.Options{OpTimeout: time.Minute})
		for range callers {
			wg.Go(func() {
				for range rounds {
					h, err := l.Acquire(t.Context(), "name", lock.Wait(time.Minute))
					if err != nil {
						t.Errorf("acquire: %v", err)
						return
					}
					if running.Add(1) != 1 {
						overlaps.Add(1)
					}
					if last := lastFence.Swap(h.Fence()); last >= h.Fence() {
						t.Errorf("fence %d after %d", h.Fence(), last)
					}
					running.Add(-1)
					if err := h.Release(t.Context()); err != nil {
						t.Errorf("release: %v", err)
					}
					served.Add(1)
				}
			})
		}
	}
	wg.Wait()
	if n := overlaps.Load(); n != 0 {
		t.Errorf("%d overlaps", n)
	}
	if n := served.Load(); n != lockers*callers*rounds {
		t.Errorf("%d served, want %d", n, lockers*callers*rounds)
	}
	if keys := server.Client.Keys(t.Context(), "lock.*").Val(); len(keys) != 0 {
		t.Errorf("keys %v are left", keys)
	}
}

func ExampleLocker_Acquire() {
	l := lock.New(lock.NewMemory(), lock.Options{})
	h, err := l.Acquire(context.Background(), "deploy", lock.Wait(5*time.Second))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer h.Release(context.Background())

	_, err = l.Acquire(context.Background(), "deploy")
	fmt.Println(err, errors.Is(err, lock.ErrHeld))
	// Output: lock is held true
}
