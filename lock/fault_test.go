package lock_test

import (
	"context"
	"errors"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// An answer that comes after the lease is no lock, and leaves none behind.
func TestAnswerAfterLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			g, err := next()
			time.Sleep(1500 * time.Millisecond)
			return g, err
		})
		_, err := l.Acquire(t.Context(), "name", lock.Lease(time.Second))
		wantError(t, err, lock.ErrUnavailable)
		store.onAcquire(nil)
		release(t, acquire(t, l, "name"))
	})
}

// The same for one that waits: it asks again, and is served.
func TestAnswerToWaiterAfterLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, other, "name")
		late := false
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			g, err := next()
			if err == nil && !late {
				late = true
				time.Sleep(1500 * time.Millisecond)
			}
			return g, err
		})
		var waiting sync.WaitGroup
		begin := time.Now()
		for range 3 {
			waiting.Go(func() { release(t, acquire(t, l, "name", lock.Lease(time.Second), lock.Wait(time.Minute))) })
		}
		synctest.Wait()
		release(t, h)
		waiting.Wait()
		if waited := time.Since(begin); !late || waited > 5*time.Second {
			t.Errorf("all were served after %v", waited)
		}
	})
}

// Zero places to wait in are none, wherever the holder is; and who polls takes a place.
func TestQueueCountsTheOneWhoPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, other, "name")
		begin := time.Now()
		_, err := l.Acquire(t.Context(), "name", lock.Wait(time.Hour), lock.Queue(0))
		wantError(t, err, lock.ErrLineFull)
		if time.Since(begin) != 0 {
			t.Errorf("waited %v", time.Since(begin))
		}
		var waiting sync.WaitGroup
		for range 2 {
			waiting.Go(func() { release(t, acquire(t, l, "name", lock.Wait(time.Hour), lock.Queue(2))) })
			synctest.Wait()
		}
		_, err = l.Acquire(t.Context(), "name", lock.Wait(time.Hour), lock.Queue(2))
		wantError(t, err, lock.ErrLineFull)
		release(t, h)
		waiting.Wait()
	})
}

func TestTimeoutSaysWhatIsInTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) {
			return lock.Grant{}, &lock.HeldError{Why: lock.ForeignValue}
		})
		_, err := l.Acquire(t.Context(), "name", lock.Wait(time.Second))
		wantError(t, err, lock.ErrTimeout)
		if timeout, ok := errors.AsType[*lock.TimeoutError](err); !ok || timeout.Why != lock.ForeignValue ||
			!strings.Contains(err.Error(), "not a lock") {
			t.Errorf("error %v", err)
		}
	})
}

// While somebody waits, the Store begins to refuse the key: when the wait ends that is what is in the
// way, and no contention.
func TestKeyIsRefusedToWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, other, "name")
		asked := 0
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			if asked++; asked == 1 {
				return next()
			}
			return lock.Grant{}, &lock.UnavailableError{ThisKey: true, Err: errors.New("WRONGTYPE")}
		})
		_, err := l.Acquire(t.Context(), "name", lock.Wait(10*time.Second))
		wantError(t, err, lock.ErrUnavailable)
		release(t, h)
	})
}

// However many requests fail during an outage, one release per attempt that was sent goes on in
// the background.
func TestOutageDoesNotPileUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onRelease(func(func() error) error { return errNoReply })
		sent := 0
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) {
			sent++
			return lock.Grant{}, errNoReply
		})
		before := runtime.NumGoroutine()
		for range 500 {
			_, err := l.Acquire(t.Context(), "name")
			wantError(t, err, lock.ErrUnavailable)
		}
		if n := runtime.NumGoroutine() - before; n > sent {
			t.Errorf("%d goroutines after %d attempts", n, sent)
		}
		if sent > 1 {
			t.Errorf("asked %d times before what is left over was cleared", sent)
		}
		store.onRelease(nil)
	})
}

// A local lock does not ask the absent Store a second time before it is given back.
func TestLocalReleaseIsImmediate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) { return lock.Grant{}, errNoReply })
		store.onRelease(func(func() error) error {
			time.Sleep(lock.DefaultOpTimeout)
			return errNoReply
		})
		h := acquire(t, l, "name", lock.OrLocal())
		begin := time.Now()
		release(t, h)
		if took := time.Since(begin); took != 0 {
			t.Errorf("took %v", took)
		}
		store.onRelease(nil)
	})
}

// A holder that does not stop when its lock is lost blocks nobody any longer, here as elsewhere.
func TestStuckHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onRenew(noRenewal)
		stuck := acquire(t, l, "name", lock.Lease(10*time.Second))
		begin := time.Now()
		next := acquire(t, l, "name", lock.Lease(time.Hour), lock.Wait(time.Minute))
		if waited := time.Since(begin); waited < 10*time.Second || waited > 11*time.Second {
			t.Errorf("the next one waited %v, want for the lease of 10s", waited)
		}
		wantError(t, stuck.Release(context.Background()), lock.ErrLost)
		_, err := l.Acquire(t.Context(), "name")
		wantError(t, err, lock.ErrHeld)
		release(t, next)
	})
}

// A lost lock that is released after the Locker was closed.
func TestCloseWaitsForLostHandle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		store.onRenew(noRenewal)
		store.onRelease(func(func() error) error { return errNoReply })
		h := acquire(t, l, "name", lock.Lease(time.Second))
		<-h.Context().Done()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := l.Close(ctx); !errors.Is(err, context.Canceled) || store.closed.Load() {
			t.Errorf("close: %v, Store closed: %v", err, store.closed.Load())
		}
		wantError(t, h.Release(context.Background()), lock.ErrLost)
	})
}

func TestPanicOfStoreLeavesNoTurn(t *testing.T) {
	l, store := newLocker(t)
	store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) { panic("bug") })
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		_, _ = l.Acquire(t.Context(), "name")
	}()
	store.onAcquire(nil)
	release(t, acquire(t, l, "name"))
}

// A slow attempt arrives after its release: it is released again.
func TestAttemptOvertakenByItsRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		late := make(chan struct{})
		var arrival sync.WaitGroup
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			arrival.Go(func() {
				<-late
				if _, err := next(); err != nil {
					t.Error(err)
				}
			})
			return lock.Grant{}, errNoReply
		})
		_, err := l.Acquire(t.Context(), "name", lock.Lease(24*time.Hour))
		wantError(t, err, lock.ErrUnavailable)
		synctest.Wait() // its release was answered: not the owner
		close(late)
		arrival.Wait()
		time.Sleep(time.Minute)
		if err := store.Inspect(t.Context(), "lock.name", ""); err != nil {
			t.Errorf("the lock was left behind: %v", err)
		}
	})
}

// opaque connections, like those with TLS, do not let the client find out that the server has
// closed them: only the next write does.
type opaque struct{ net.Conn }

func TestEveryConnectionOfThePoolIsBroken(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := redis.NewClient(&redis.Options{
		Addr: server.Addr, MaxRetries: -1, DialerRetries: 1, ContextTimeoutEnabled: true,
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, addr)
			return opaque{conn}, err
		},
	})
	store := lock.NewGetSet(client)
	defer store.Close()
	server.Pause() // so that all of them need a connection at the same time
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := client.Ping(t.Context()).Err(); err != nil {
				t.Error(err)
			}
		})
	}
	for client.PoolStats().TotalConns < 8 {
		time.Sleep(time.Millisecond)
	}
	server.Resume()
	wg.Wait()
	server.Client.Do(t.Context(), "client", "kill", "type", "normal", "skipme", "yes")
	token := newToken()
	if _, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: token, Lease: time.Minute}); err != nil {
		t.Errorf("acquire: %v", err)
	}
	if err := giveBack(t, store, mainKey, token); err != nil {
		t.Errorf("release: %v", err)
	}
}
