package lock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

func openToken(t *testing.T, server *redistest.Server) lock.Store {
	t.Helper()
	return open(t, server, lock.NewToken)
}

func TestKeyHoldsTokenUntilItsEnd(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openToken(t, server)
	token := newToken()
	ends := func(lease time.Duration, before time.Time) {
		t.Helper()
		after := server.Now(t)
		if v := server.Client.Get(t.Context(), mainKey).Val(); v != string(token) {
			t.Errorf("key holds %q, want the token %q", v, token)
		}
		vanishes := time.UnixMilli(server.Client.PExpireTime(t.Context(), mainKey).Val().Milliseconds())
		before = before.Truncate(time.Millisecond)
		if vanishes.Before(before.Add(lease)) || vanishes.After(after.Add(lease)) {
			t.Errorf("key vanishes at %v, want %v after %v to %v", vanishes, lease, before, after)
		}
		e, err := strconv.ParseFloat(server.Client.HGet(t.Context(), holderKey, "e").Val(), 64)
		if written := time.UnixMilli(int64(e*1000 + 0.5)); err != nil || written.After(vanishes) || written.Before(before.Add(lease)) {
			t.Errorf("holder record says %v, %v; want %v or little before", written, err, vanishes)
		}
	}
	// At the beginning of a second, where milliseconds have fewer digits.
	now := server.Now(t)
	time.Sleep(now.Truncate(time.Second).Add(time.Second).Sub(now))
	before := server.Now(t)
	acquired, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: token, Lease: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ends(30*time.Second, before)
	again, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: token, Lease: 30 * time.Second})
	if err != nil || again.TTL > acquired.TTL || again.TTL < 20*time.Second || again.Fence != acquired.Fence {
		t.Errorf("acquire: %+v, and %+v, %v when asked again", acquired, again, err)
	}
	before = server.Now(t)
	if _, err := store.Renew(t.Context(), mainKey, lock.Claim{Token: token, Lease: time.Minute}); err != nil {
		t.Fatal(err)
	}
	ends(time.Minute, before)
	leavesFence(t, server, store, token)
}

// What others may have in the key: it is refused, and stays as it is.
func TestForeignKeys(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openToken(t, server)
	set := func(value string, ttl time.Duration) func(string) {
		return func(key string) { server.Client.Set(t.Context(), key, value, ttl) }
	}
	for _, c := range []struct {
		name  string
		write func(key string)
		why   lock.Reason
		lasts time.Duration // 0: not known
	}{
		{"token", set("f6c2", time.Minute), lock.ForeignHolder, time.Minute},
		{"Unix second", set("4000000000", time.Hour), lock.ForeignHolder, time.Hour},
		{"token for ages", set("f6c2", 200*365*24*time.Hour), lock.ForeignHolder, 1e15 * time.Microsecond},
		{"token without end", set("f6c2", 0), lock.ForeignValue, 0},
		{"empty", set("", time.Minute), lock.ForeignValue, 0},
		{"another type", func(key string) {
			server.Client.RPush(t.Context(), key, "x")
			server.Client.Expire(t.Context(), key, time.Minute)
		}, lock.ForeignValue, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			key := "lock." + c.name
			c.write(key)
			before := server.Client.Dump(t.Context(), key).Val()
			claim := lock.Claim{Token: newToken(), Lease: 30 * time.Second, Wait: true}
			_, acquire := store.Acquire(t.Context(), key, claim)
			for operation, err := range map[string]error{"acquire": acquire, "inspect": store.Inspect(t.Context(), key, "")} {
				held, ok := errors.AsType[*lock.HeldError](err)
				if !ok || held.Why != c.why || held.For > c.lasts+time.Millisecond || held.For < c.lasts-time.Minute/2 {
					t.Errorf("%s: %+v, want held (%s) for %v", operation, err, c.why, c.lasts)
				}
			}
			_, err := store.Release(t.Context(), key, claim)
			if lost, ok := errors.AsType[*lock.LostError](err); !ok || lost.Why != lock.NotOwner {
				t.Errorf("release: %v, want lost (not-owner)", err)
			}
			if after := server.Client.Dump(t.Context(), key).Val(); after != before {
				t.Errorf("the foreign value %q became %q", before, after)
			}
		})
	}
}

// A foreign hand at the key of a lock that we hold: the holder notices, and what the foreign hand
// wrote stays and counts.
func TestForeignHandAtToken(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		meddle func(context.Context, *redis.Client)
		others lock.Reason
	}{
		{"another's lock", func(ctx context.Context, c *redis.Client) { c.Set(ctx, mainKey, "f6c2", time.Minute) }, lock.ForeignHolder},
		{"without end", func(ctx context.Context, c *redis.Client) { c.Set(ctx, mainKey, "f6c2", 0) }, lock.ForeignValue},
		{"another type", func(ctx context.Context, c *redis.Client) {
			c.Del(ctx, mainKey)
			c.RPush(ctx, mainKey, "x")
		}, lock.ForeignValue},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			store := openToken(t, server)
			token := newToken()
			if _, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: token, Lease: time.Minute}); err != nil {
				t.Fatal(err)
			}
			c.meddle(t.Context(), server.Client)
			record := server.Client.HGetAll(t.Context(), holderKey).Val()
			_, err := store.Renew(t.Context(), mainKey, lock.Claim{Token: token, Lease: time.Minute})
			if lost, ok := errors.AsType[*lock.LostError](err); !ok || lost.Why != lock.MainChanged {
				t.Errorf("renew: %v, want lost (main-changed)", err)
			}
			if now := server.Client.HGetAll(t.Context(), holderKey).Val(); len(now) != len(record) {
				t.Errorf("a refused renewal changed the holder record from %v to %v", record, now)
			}
			_, err = store.Acquire(t.Context(), mainKey, lock.Claim{Token: newToken(), Lease: time.Minute})
			if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Why != c.others {
				t.Errorf("acquire by another: %v, want held (%s)", err, c.others)
			}
			err = giveBack(t, store, mainKey, token)
			if lost, ok := errors.AsType[*lock.LostError](err); !ok || lost.Why != lock.MainChanged {
				t.Errorf("release: %v, want lost (main-changed)", err)
			}
			if server.Client.Exists(t.Context(), mainKey).Val() != 1 {
				t.Error("the release removed what the foreign hand wrote")
			}
		})
	}
}

// Somebody removes the TTL of a lock that we hold. It is still ours, ends again with the next
// renewal, and is no obstacle after its release.
func TestRemovedTTL(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openToken(t, server)
	claim := lock.Claim{Token: newToken(), Lease: time.Minute}
	if _, err := store.Acquire(t.Context(), mainKey, claim); err != nil {
		t.Fatal(err)
	}
	server.Client.Persist(t.Context(), mainKey)
	if _, err := store.Renew(t.Context(), mainKey, claim); err != nil {
		t.Errorf("renew: %v", err)
	}
	if ttl := server.Client.PTTL(t.Context(), mainKey).Val(); ttl <= 0 || ttl > time.Minute {
		t.Errorf("TTL after a renewal: %v, want a minute", ttl)
	}
	server.Client.Persist(t.Context(), mainKey)
	server.Client.HSet(t.Context(), holderKey, "e", 1) // stands for the end of its lease
	if g, err := store.Acquire(t.Context(), mainKey, claim); err != nil || g.TTL < time.Minute/2 {
		t.Errorf("asked again: %+v, %v, want a lock with an end", g, err)
	}
	server.Client.Persist(t.Context(), mainKey)
	if err := giveBack(t, store, mainKey, claim.Token); err != nil {
		t.Errorf("release: %v", err)
	}
	if _, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: newToken(), Lease: time.Minute}); err != nil {
		t.Errorf("acquire by another: %v", err)
	}
}

// A foreignLock is what other programs do.
type foreignLock struct {
	client     *redis.Client
	key, token string
}

func (f foreignLock) acquire(t *testing.T, lease time.Duration) bool {
	t.Helper()
	got, err := f.client.SetNX(t.Context(), f.key, f.token, lease).Result()
	if err != nil {
		t.Error(err)
	}
	return got
}

func (f foreignLock) renew(t *testing.T, lease time.Duration) bool {
	t.Helper()
	return f.eval(t, `return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('PEXPIRE', KEYS[1], ARGV[2]) or 0`, lease.Milliseconds())
}

func (f foreignLock) release(t *testing.T) bool {
	t.Helper()
	return f.eval(t, `return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0`)
}

func (f foreignLock) eval(t *testing.T, script string, more ...any) bool {
	t.Helper()
	n, err := f.client.Eval(t.Context(), script, []string{f.key}, append([]any{f.token}, more...)...).Int()
	if err != nil {
		t.Error(err)
	}
	return n == 1
}

func TestForeignProgramIsRefusedByOurLock(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openToken(t, server)
	foreign := foreignLock{server.Client, mainKey, "f6c2"}
	claim := lock.Claim{Token: newToken(), Lease: time.Minute}
	if _, err := store.Acquire(t.Context(), mainKey, claim); err != nil {
		t.Fatal(err)
	}
	if foreign.acquire(t, time.Minute) || foreign.renew(t, time.Minute) || foreign.release(t) {
		t.Error("a foreign program has our lock")
	}
	next := lock.Claim{Token: newToken(), Lease: time.Minute, Wait: true}
	if _, err := store.Acquire(t.Context(), mainKey, next); !errors.Is(err, lock.ErrHeld) {
		t.Fatalf("acquire by another: %v, want held", err)
	}
	if to, err := store.Release(t.Context(), mainKey, claim); err != nil || to.Token != next.Token {
		t.Errorf("release: %+v, %v, want a hand-over", to, err)
	}
	if foreign.acquire(t, time.Minute) {
		t.Error("a foreign program has a lock that was handed over")
	}
	if _, err := store.Release(t.Context(), mainKey, next); err != nil {
		t.Fatal(err)
	}
	if !foreign.acquire(t, time.Minute) {
		t.Error("a foreign program is refused a lock that we released")
	}
}

func TestForeignProgramKeepsItsLock(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openToken(t, server)
	foreign := foreignLock{server.Client, mainKey, "f6c2"}
	// Our holder died, or is late, and its key is gone.
	late := lock.Claim{Token: newToken(), Lease: time.Minute}
	first, err := store.Acquire(t.Context(), mainKey, late)
	if err != nil {
		t.Fatal(err)
	}
	server.Client.HSet(t.Context(), holderKey, "e", 1)
	server.Client.Del(t.Context(), mainKey)
	if !foreign.acquire(t, time.Minute) {
		t.Fatal("a foreign program is refused an expired lock")
	}
	if _, err := store.Renew(t.Context(), mainKey, late); !errors.Is(err, lock.ErrLost) {
		t.Errorf("renew by the late holder: %v, want lost", err)
	}
	if err := giveBack(t, store, mainKey, late.Token); !errors.Is(err, lock.ErrLost) {
		t.Errorf("release by the late holder: %v, want lost", err)
	}
	next := lock.Claim{Token: newToken(), Lease: time.Minute, Wait: true}
	_, err = store.Acquire(t.Context(), mainKey, next)
	if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Why != lock.ForeignHolder || held.Place == 0 {
		t.Errorf("acquire: %v, want held (foreign-holder), with a place", err)
	}
	if !foreign.renew(t, time.Minute) || !foreign.release(t) {
		t.Error("the foreign program has lost its lock")
	}
	g, err := store.Acquire(t.Context(), mainKey, next)
	if err != nil || g.Fence <= first.Fence {
		t.Errorf("acquire: %+v, %v, want a fence after %d", g, err, first.Fence)
	}
}

// Ours, in line, and foreign programs, which poll, all want one lock.
func TestExclusiveAmongForeignPrograms(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var inside, foreign, ours atomic.Int32
	work := func(done *atomic.Int32) {
		if n := inside.Add(1); n != 1 {
			t.Errorf("%d hold the lock at once", n)
		}
		time.Sleep(time.Millisecond)
		done.Add(1)
		inside.Add(-1)
	}
	const rounds = 30
	var all sync.WaitGroup
	for i := range 3 {
		f := foreignLock{server.Client, "lock.name", fmt.Sprintf("foreign%d", i)}
		all.Go(func() {
			for range rounds {
				for !f.acquire(t, time.Minute) {
					time.Sleep(time.Millisecond)
				}
				work(&foreign)
				if !f.release(t) {
					t.Error("a foreign program has lost its lock")
				}
			}
		})
		l := lock.New(openToken(t, server), lock.Options{OpTimeout: time.Minute})
		for range 2 {
			all.Go(func() {
				for range rounds {
					h, err := l.Acquire(t.Context(), "name", lock.Wait(time.Minute))
					if err != nil {
						t.Error(err)
						return
					}
					work(&ours)
					if err := h.Release(context.WithoutCancel(t.Context())); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	all.Wait()
	if foreign.Load() != 3*rounds || ours.Load() != 6*rounds {
		t.Errorf("foreign programs had it %d times, we %d times", foreign.Load(), ours.Load())
	}
	noTrace(t, server)
}

func TestTokenLine(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var in []*lock.Locker
	for range 3 {
		in = append(in, lock.New(openToken(t, server), lock.Options{OpTimeout: time.Minute}))
	}
	order := serve(t, server, slices.Repeat(in, 4), func() {})
	if !slices.Equal(order, inOrder(12)) {
		t.Errorf("served in the order %v", order)
	}
	noTrace(t, server)
}

// A lock that nobody renews can be had after its lease, and not a second later.
func TestTokenExpiresByTheMillisecond(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openToken(t, server)
	if _, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: newToken(), Lease: time.Second}); err != nil {
		t.Fatal(err)
	}
	end := time.UnixMilli(server.Client.PExpireTime(t.Context(), mainKey).Val().Milliseconds())
	next := lock.Claim{Token: newToken(), Lease: time.Minute}
	said := time.Time{} // when it was to be free
	for {
		before := server.Now(t)
		_, err := store.Acquire(t.Context(), mainKey, next)
		after := server.Now(t)
		held, ok := errors.AsType[*lock.HeldError](err)
		switch {
		case err == nil && !after.After(end):
			t.Errorf("taken at %v, before its end %v", after, end)
		case err != nil && (!ok || held.For <= 0):
			t.Errorf("acquire: %+v, want held for some time", err)
		case ok && before.Add(-time.Millisecond).After(end):
			t.Errorf("held at %v, after its end %v", before, end)
		case ok:
			if before.Add(held.For).After(end.Add(2 * time.Millisecond)) {
				t.Errorf("said to be held for %v at %v, want it to end at %v", held.For, before, end)
			}
			if free := after.Add(held.For); free.After(said) {
				said = free
			}
			time.Sleep(min(held.For, 300*time.Millisecond))
			continue
		}
		break
	}
	if said.Before(end.Add(time.Millisecond)) {
		t.Errorf("said to be free at %v, want the millisecond after %v", said, end)
	}
}

// As during a change of protocols: neither takes what the other has.
func TestProtocolsStayOutOfEachOthersWay(t *testing.T) {
	t.Parallel()
	for _, swap := range []bool{false, true} {
		server := redistest.Start(t)
		first, second := openGetSet(t, server), openToken(t, server)
		if swap {
			first, second = second, first
		}
		holder, other := lock.Claim{Token: newToken(), Lease: time.Minute}, lock.Claim{Token: newToken(), Lease: time.Minute}
		if _, err := first.Acquire(t.Context(), mainKey, holder); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time after a release of what it never had
			if _, err := second.Acquire(t.Context(), mainKey, other); !errors.Is(err, lock.ErrHeld) {
				t.Errorf("acquire: %v, want held", err)
			}
			if _, err := second.Renew(t.Context(), mainKey, holder); !errors.Is(err, lock.ErrLost) {
				t.Errorf("renew by the other protocol: %v, want lost", err)
			}
			_ = giveBack(t, second, mainKey, other.Token)
		}
		if err := giveBack(t, first, mainKey, holder.Token); err != nil {
			t.Errorf("release: %v", err)
		}
		if _, err := second.Acquire(t.Context(), mainKey, other); err != nil {
			t.Errorf("acquire after the release: %v", err)
		}
	}
}
