package lock_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

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

// The delivery under way is sent again while the Store is away: the newest keeps its place.
func TestRedeliveryInOutageDisplacesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, l, "name", lock.Dedupe("x"), lock.Supersede(), lock.Lease(time.Hour))
		var old, waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 1, lock.Dedupe("y"), lock.Supersede())
		store.onAcquire(refuseConnections)
		displaced(t, l, &old, lock.Dedupe("x"))
		time.Sleep(time.Second)
		store.onAcquire(nil)
		old.Wait()
		h.Done(time.Hour)
		release(t, h)
		waiting.Wait()
	})
}

// One process is cut off: who waits there without a place is older than who comes elsewhere meanwhile.
func TestOlderElsewhereDisplacesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, l, "name", lock.Lease(time.Hour))
		store.onAcquire(refuseConnections)
		var old, waiting sync.WaitGroup
		var served []int
		displaced(t, l, &old)
		time.Sleep(30 * time.Second)
		waits(t, other, &waiting, &served, 1, lock.Supersede())
		store.onAcquire(nil)
		old.Wait()
		release(t, h)
		waiting.Wait()
	})
}

// One that has taken the place of another waits, although the line is full by then.
func TestFullLineDoesNotLoseTheNewest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, other, "name", lock.Lease(time.Hour))
		var old, waiting sync.WaitGroup
		displaced(t, other, &old)
		synctest.Wait()
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			time.Sleep(10 * time.Millisecond)
			return next()
		})
		for i, options := range [][]lock.AcquireOption{{}, {lock.Supersede()}} {
			waiting.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				release(t, acquire(t, l, "name", append(options, lock.Wait(time.Hour), lock.Queue(1))...))
			})
		}
		old.Wait()
		release(t, h)
		waiting.Wait()
	})
}

// A question of one that is displaced meanwhile goes unanswered: it does not take the lock without the Store.
func TestSupersededTakesNoLocalLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, other, "name", lock.Lease(time.Hour))
		var old, waiting sync.WaitGroup
		displaced(t, l, &old, lock.OrLocal())
		synctest.Wait()
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) {
			store.onAcquire(nil)
			time.Sleep(1900 * time.Millisecond)
			return lock.Grant{}, errNoReply
		})
		time.Sleep(lock.Heartbeat + 100*time.Millisecond) // it asks
		var served []int
		waits(t, l, &waiting, &served, 1, lock.Supersede())
		old.Wait()
		release(t, h)
		waiting.Wait()
	})
}

// Without messages those who are displaced find out by asking, also behind others of their process, and at the
// latest when their wait runs out.
func TestDeafHearThatTheyAreSuperseded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		deafOne := lock.New(deaf{store}, lock.Options{})
		h := acquire(t, l, "name", lock.Lease(time.Hour))
		var old, waiting sync.WaitGroup
		var served []int
		waits(t, deafOne, &waiting, &served, 1)
		displaced(t, deafOne, &old)
		time.Sleep(time.Millisecond)
		displaced(t, deafOne, &old, lock.Wait(100*time.Millisecond))
		time.Sleep(time.Millisecond)
		waits(t, l, &waiting, &served, 2, lock.Supersede())
		begin := time.Now()
		old.Wait()
		if waited := time.Since(begin); waited > lock.Heartbeat {
			t.Errorf("heard of it after %v", waited)
		}
		release(t, h)
		waiting.Wait()
	})
}

// Whose process is dead is nobody's successor: the delivery under way that is sent again waits.
func TestDeadSupersedeNobody(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	newClaim := func(token lock.Token) lock.Claim { return lock.Claim{Token: token, Lease: time.Hour, Wait: true} }
	holder, again := newClaim(newToken().Handling("x")), newClaim(newToken().Handling("x").Superseding())
	dead := newClaim(newToken().Superseding())
	_, err := store.Acquire(t.Context(), mainKey, holder)
	wantError(t, err, nil)
	_, err = store.Acquire(t.Context(), mainKey, dead)
	wantError(t, err, lock.ErrHeld)
	_, err = store.Acquire(t.Context(), mainKey, newClaim(newToken())) // keeps the line
	wantError(t, err, lock.ErrHeld)
	server.Client.HDel(t.Context(), "{lock.foo}:alive", string(dead.Token[:10]))
	_, err = store.Acquire(t.Context(), mainKey, again)
	wantError(t, err, lock.ErrHeld)
}

// A newcomer that gets the lock at once tells those whose place it takes, in a cluster, too.
func TestGrantTellsTheDisplaced(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	open := overCluster(t, cluster)
	here, there := open(), open()
	process := lock.NewProcess()
	listening, told := make(chan bool, 10), make(chan lock.Token, 10)
	here.Listen(process, lock.Listener{
		Handed:    func(token lock.Token) { told <- token },
		Listening: func(on bool, _ error) { listening <- on },
	})
	<-listening
	claim := func(token lock.Token) lock.Claim { return lock.Claim{Token: token, Lease: time.Hour, Wait: true} }
	holder, old := claim(newToken()), claim(process.NewToken().Superseding())
	_, err := there.Acquire(t.Context(), mainKey, holder)
	wantError(t, err, nil)
	_, err = here.Acquire(t.Context(), mainKey, old)
	wantError(t, err, lock.ErrHeld)
	if err := there.ForceRelease(t.Context(), mainKey); err != nil {
		t.Fatal(err)
	}
	_, err = there.Acquire(t.Context(), mainKey, claim(newToken().Superseding()))
	wantError(t, err, nil)
	if token := <-told; token != old.Token {
		t.Errorf("told %v, want %v", token, old.Token)
	}
}

// The error of one that stood in line says so: nobody runs in place of those that it displaced.
func TestNewestThatDoesNotRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, l, "name", lock.Lease(time.Hour))
		left, leave := context.WithCancel(t.Context())
		isNewest := func(ctx context.Context, want bool, options ...lock.AcquireOption) {
			t.Helper()
			_, err := l.Acquire(ctx, "name", append(options, lock.Supersede())...)
			if _, is := errors.AsType[*lock.NewestError](err); is != want || err == nil {
				t.Errorf("%v: %T", err, err)
			}
		}
		isNewest(t.Context(), true, lock.Wait(time.Second))
		time.AfterFunc(time.Second, leave)
		isNewest(left, true, lock.Wait(time.Minute))
		isNewest(t.Context(), false, lock.Wait(time.Second), lock.Queue(0))
		var old, waiting sync.WaitGroup
		displaced(t, l, &old)
		synctest.Wait()
		var served []int
		waits(t, l, &waiting, &served, 1, lock.Supersede())
		old.Wait()
		release(t, h)
		waiting.Wait()
		store.onAcquire(refuseConnections)
		isNewest(t.Context(), false, lock.Wait(time.Second)) // it displaced nobody
		store.onAcquire(func(func() (lock.Grant, error)) (lock.Grant, error) { return lock.Grant{}, errNoReply })
		isNewest(t.Context(), true, lock.Wait(time.Second)) // who knows
	})
}

// One process is cut off while the newest comes there. The delivery under way is sent again elsewhere meanwhile:
// it takes nobody's place, neither of those that Redis knows nor of those that it will hear of.
func TestRedeliveryElsewhereDisplacesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		h := acquire(t, l, "name", lock.Dedupe("x"), lock.Supersede(), lock.Wait(time.Hour), lock.Lease(time.Hour))
		store.onAcquire(refuseConnections)
		var old, waiting sync.WaitGroup
		var served []int
		waits(t, l, &waiting, &served, 1, lock.Dedupe("y"), lock.Supersede())
		time.Sleep(time.Second)
		displaced(t, other, &old, lock.Dedupe("x"))
		time.Sleep(time.Second)
		store.onAcquire(nil)
		old.Wait()
		h.Done(time.Hour)
		release(t, h)
		waiting.Wait()
	})
}

// The same for a newest in line whose process is taken for dead meanwhile.
func TestRedeliveryLeavesTheNewestItsPlace(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	came := time.Now()
	claim := func(delivery string, after time.Duration) lock.Claim {
		return lock.Claim{Token: newToken().Handling(delivery).Superseding(), Lease: time.Hour, Wait: true, Since: came.Add(after - time.Minute)}
	}
	want := func(c lock.Claim, want error) {
		t.Helper()
		_, err := store.Acquire(t.Context(), mainKey, c)
		wantError(t, err, want)
	}
	x, y, again := claim("x", 0), claim("y", time.Second), claim("x", 2*time.Second)
	want(x, nil)
	want(y, lock.ErrHeld)
	server.Client.Del(t.Context(), "{lock.foo}:alive")
	want(again, lock.ErrHeld)
	x.Done = time.Hour
	_, err := store.Release(t.Context(), mainKey, x)
	wantError(t, err, nil)
	want(again, lock.ErrDone)
	_, err = store.Release(t.Context(), mainKey, again)
	if err != nil {
		wantError(t, err, lock.ErrLost)
	}
	want(y, nil)
}

// The age that counts is that of the moment at which the question goes out: before, it may have waited for a
// connection, or for others.
func TestWaitForAConnectionMakesNobodyNewer(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	slow := make(chan struct{})
	options := clientOptions(server.Addr)
	options.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		<-slow
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	cold, warm := over(t, lock.NewGetSet, options)(), openGetSet(t, server)
	const before = time.Second // far more than a question takes
	claim := func(since time.Time) lock.Claim {
		return lock.Claim{Token: newToken().Superseding(), Lease: time.Hour, Wait: true, Since: since}
	}
	_, err := warm.Acquire(t.Context(), mainKey, claim(time.Now().Add(-2*before)))
	wantError(t, err, nil)
	newest := claim(time.Now())
	older := make(chan error)
	go func() {
		_, err := cold.Acquire(patient(t), mainKey, claim(newest.Since.Add(-before)))
		older <- err
	}()
	_, err = warm.Acquire(t.Context(), mainKey, newest)
	wantError(t, err, lock.ErrHeld)
	await(t, "the older one to have waited for long", func() bool { return time.Since(newest.Since) > 2*before })
	close(slow)
	wantError(t, <-older, lock.ErrSuperseded)
}

// One that gets the lock in place of another, and whose caller has left by then, says so.
func TestNewestThatLeavesWithTheLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		ctx, leave := context.WithCancel(t.Context())
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			defer leave()
			return next()
		})
		_, err := l.Acquire(ctx, "name", lock.Wait(time.Minute), lock.Supersede())
		if _, is := errors.AsType[*lock.NewestError](err); !is || !errors.Is(err, context.Canceled) {
			t.Errorf("%T: %v", err, err)
		}
	})
}

// The Store goes away with the last question of one that supersedes: that is a time-out while somebody here has the
// lock, as for anybody else, and no outage for one that can do without.
func TestLastQuestionGoesUnanswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		other := lock.New(store.Store, lock.Options{})
		away := func() { time.AfterFunc(300*time.Millisecond, func() { store.onAcquire(refuseConnections) }) }

		h := acquire(t, l, "name", lock.Lease(time.Hour))
		away()
		_, err := l.Acquire(t.Context(), "name", lock.Supersede(), lock.Wait(500*time.Millisecond))
		wantError(t, err, lock.ErrTimeout)
		store.onAcquire(nil)
		synctest.Wait() // its place is given back in the background
		release(t, h)

		h = acquire(t, other, "name", lock.Lease(time.Hour))
		away()
		local := acquire(t, l, "name", lock.Supersede(), lock.OrLocal(), lock.Wait(500*time.Millisecond))
		if !local.Local() {
			t.Error("not local")
		}
		release(t, local)
		store.onAcquire(nil)
		release(t, h)
	})
}

// A newer one comes while the last question of one is under way.
func TestSupersededAtItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLocker(t)
		h := acquire(t, l, "name", lock.Lease(time.Hour))
		var old, waiting sync.WaitGroup
		displaced(t, l, &old, lock.Wait(500*time.Millisecond))
		time.Sleep(499 * time.Millisecond)
		store.onAcquire(func(next func() (lock.Grant, error)) (lock.Grant, error) {
			store.onAcquire(nil)
			defer time.Sleep(100 * time.Millisecond)
			return next()
		})
		time.Sleep(51 * time.Millisecond)
		var served []int
		waits(t, l, &waiting, &served, 1, lock.Supersede())
		old.Wait()
		release(t, h)
		waiting.Wait()
	})
}
