package lock_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

const (
	mainKey   = "lock.foo"
	holderKey = "{lock.foo}:holder"
)

func openGetSet(t *testing.T, server *redistest.Server) lock.Store {
	t.Helper()
	return open(t, server, lock.NewGetSet)
}

func open(t *testing.T, server *redistest.Server, newStore func(redis.UniversalClient) lock.Store) lock.Store {
	t.Helper()
	return over(t, newStore, clientOptions(server.Addr))()
}

// value returns what the lock's key holds, and fails unless it is a plain integer.
func value(t *testing.T, server *redistest.Server, key string) int64 {
	t.Helper()
	text, err := server.Client.Get(t.Context(), key).Result()
	if err != nil {
		t.Fatalf("get %s: %v", key, err)
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		t.Fatalf("%s holds %q, want a plain integer", key, text)
	}
	return n
}

func TestKeyHoldsUnixSecondOfItsEnd(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	token := newToken()
	before := server.Now(t).Unix()
	if _, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: token, Lease: 30 * time.Second}); err != nil {
		t.Fatal(err)
	}
	after := server.Now(t).Unix()
	if v := value(t, server, mainKey); v < before+31 || v > after+31 {
		t.Errorf("key holds %d, want its lease of 30s and 1 more after %d to %d", v, before, after)
	}
	end := time.Unix(value(t, server, mainKey), 0)
	ttl := server.Client.PTTL(t.Context(), mainKey).Val()
	if expires := server.Now(t).Truncate(time.Millisecond).Add(ttl); expires.Before(end.Add(2 * time.Second)) {
		t.Errorf("key vanishes at %v, before 2s after its end %v", expires, end)
	}
	leavesFence(t, server, store, token)
}

// leavesFence releases a lock, after which nothing is to be left but the fence.
func leavesFence(t *testing.T, server *redistest.Server, store lock.Store, token lock.Token) {
	t.Helper()
	if ttl := server.Client.TTL(t.Context(), holderKey).Val(); ttl < 9*time.Minute || ttl > 10*time.Minute {
		t.Errorf("holder record has a TTL of %v, want 10m", ttl)
	}
	if err := giveBack(t, store, mainKey, token); err != nil {
		t.Fatal(err)
	}
	if n := server.Client.Exists(t.Context(), mainKey).Val(); n != 0 {
		t.Error("key is still there after the release")
	}
	if left := server.Client.HGetAll(t.Context(), holderKey).Val(); len(left) != 1 || left["f"] == "" {
		t.Errorf("holder record after the release: %v, want the fence alone", left)
	}
}

// What a program that speaks the published algorithm may leave in the key.
func TestForeignValues(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	now := server.Now(t).Unix()
	at := func(offset int64) string { return strconv.FormatInt(now+offset, 10) }
	for _, c := range []struct {
		name, value string
		why         lock.Reason // empty: taken at once
	}{
		{"expired", at(-1), ""},
		{"expired float", at(-5) + ".75", ""},
		{"expired long ago", "1", ""},
		{"zero", "0", ""},
		{"live", at(100), lock.ForeignHolder},
		{"live float", at(100) + ".5", lock.ForeignHolder},
		{"milliseconds", at(100) + "000", lock.ForeignValue},
		{"twelve digits", "999999999999", lock.ForeignHolder},
		{"empty", "", lock.ForeignValue},
		{"text", "locked", lock.ForeignValue},
		{"negative", "-5", lock.ForeignValue},
		{"exponent", "1e9", lock.ForeignValue},
		{"two dots", "1.2.3", lock.ForeignValue},
		{"spaces", " 5", lock.ForeignValue},
	} {
		t.Run(c.name, func(t *testing.T) {
			key := "lock." + strings.ReplaceAll(c.name, " ", "_")
			server.Client.Set(t.Context(), key, c.value, 0)
			token := newToken()
			_, err := store.Acquire(t.Context(), key, lock.Claim{Token: token, Lease: 30 * time.Second})
			if c.why == "" {
				if err != nil {
					t.Fatalf("acquire: %v, want it taken at once", err)
				}
				if v := value(t, server, key); v < now+31 {
					t.Errorf("key holds %d, want the end of our lease", v)
				}
				if ttl := server.Client.TTL(t.Context(), key).Val(); ttl <= 0 {
					t.Errorf("key has TTL %v, want one", ttl)
				}
				return
			}
			held, ok := errors.AsType[*lock.HeldError](err)
			if !ok || held.Why != c.why {
				t.Fatalf("acquire: %v, want held (%s)", err, c.why)
			}
			if got := server.Client.Get(t.Context(), key).Val(); got != c.value {
				t.Errorf("the foreign value %q became %q", c.value, got)
			}
		})
	}
	t.Run("another type", func(t *testing.T) {
		server.Client.RPush(t.Context(), "lock.list", "x")
		_, err := store.Acquire(t.Context(), "lock.list", lock.Claim{Token: newToken(), Lease: 30 * time.Second})
		if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Why != lock.ForeignValue {
			t.Errorf("acquire: %v, want held (foreign-value)", err)
		}
	})
}

// A holder owns its lock strictly before the second in the key, others take it strictly
// after: in that second nobody can have it.
func TestSecondOfTheEndBelongsToNobody(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	for { // again if the second changed in between
		now := server.Now(t).Unix()
		server.Client.Set(t.Context(), mainKey, now, time.Minute)
		server.Client.HSet(t.Context(), holderKey, "t", "us", "e", now, "f", 1)
		_, taken := store.Acquire(t.Context(), mainKey, lock.Claim{Token: newToken(), Lease: time.Second})
		_, renewed := store.Renew(t.Context(), mainKey, lock.Claim{Token: "us", Lease: time.Second})
		if server.Now(t).Unix() != now {
			continue
		}
		if !errors.Is(taken, lock.ErrHeld) {
			t.Errorf("acquire by another: %v, want held", taken)
		}
		if lost, ok := errors.AsType[*lock.LostError](renewed); !ok || lost.Why != lock.Expired {
			t.Errorf("renew by the holder: %v, want lost (expired)", renewed)
		}
		return
	}
}

// A foreign hand at the key of a lock that we hold: the holder notices, nobody of ours gets
// in before its lease has passed, and what the foreign hand wrote stays.
func TestForeignHand(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		meddle  func(*testing.T, *redistest.Server)
		lost    lock.Reason
		others  lock.Reason // why others are refused while the holder lives
		remains bool        // the key survives the holder's release
	}{
		{"delete", func(t *testing.T, s *redistest.Server) {
			s.Client.Del(t.Context(), mainKey)
		}, lock.MainGone, lock.OwnerLive, false},
		{"overwrite with an expired second", func(t *testing.T, s *redistest.Server) {
			s.Client.Set(t.Context(), mainKey, "1", 0)
		}, lock.MainChanged, lock.OwnerLive, true},
		{"overwrite with a later second", func(t *testing.T, s *redistest.Server) {
			s.Client.Set(t.Context(), mainKey, value(t, s, mainKey)+5, 0)
		}, lock.MainChanged, lock.Held, true},
		{"overwrite with another type", func(t *testing.T, s *redistest.Server) {
			s.Client.Del(t.Context(), mainKey)
			s.Client.RPush(t.Context(), mainKey, "x")
		}, lock.MainChanged, lock.ForeignValue, true},
		{"GETSET of the same second", func(t *testing.T, s *redistest.Server) {
			s.Client.GetSet(t.Context(), mainKey, value(t, s, mainKey))
		}, lock.MainRewritten, lock.Held, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			store := openGetSet(t, server)
			token := newToken()
			if _, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: token, Lease: time.Minute}); err != nil {
				t.Fatal(err)
			}
			c.meddle(t, server)
			record := server.Client.HGetAll(t.Context(), holderKey).Val()
			_, err := store.Renew(t.Context(), mainKey, lock.Claim{Token: token, Lease: time.Minute})
			if lost, ok := errors.AsType[*lock.LostError](err); !ok || lost.Why != c.lost {
				t.Errorf("renew: %v, want lost (%s)", err, c.lost)
			}
			if now := server.Client.HGetAll(t.Context(), holderKey).Val(); len(now) != len(record) {
				t.Errorf("a refused renewal changed the holder record from %v to %v", record, now)
			}
			_, err = store.Acquire(t.Context(), mainKey, lock.Claim{Token: newToken(), Lease: time.Minute})
			if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Why != c.others {
				t.Errorf("acquire by another: %v, want held (%s)", err, c.others)
			}
			err = giveBack(t, store, mainKey, token)
			if lost, ok := errors.AsType[*lock.LostError](err); !ok || lost.Why != c.lost {
				t.Errorf("release: %v, want lost (%s)", err, c.lost)
			}
			if left := server.Client.Exists(t.Context(), mainKey).Val() == 1; left != c.remains {
				t.Errorf("key is there after the release: %v, want %v", left, c.remains)
			}
		})
	}
}

func TestFenceSurvivesClockOfEarlierHolder(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	const ahead = 9_000_000_000_000_000 // the server's clock was once far ahead
	server.Client.HSet(t.Context(), holderKey, "f", int64(ahead))
	g, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: newToken(), Lease: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if g.Fence != ahead+1 {
		t.Errorf("fence %d, want %d", g.Fence, int64(ahead+1))
	}
	if f := server.Client.HGet(t.Context(), holderKey, "f").Val(); f != "9000000000000001" {
		t.Errorf("stored fence %q, want all its digits", f)
	}
}

func TestScriptsAreSentOnce(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	for range 10 {
		token := newToken()
		if _, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: token, Lease: time.Minute}); err != nil {
			t.Fatal(err)
		}
		if err := giveBack(t, store, mainKey, token); err != nil {
			t.Fatal(err)
		}
	}
	server.Client.ScriptFlush(t.Context()) // as after a restart
	if _, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: newToken(), Lease: time.Minute}); err != nil {
		t.Fatal(err)
	}
	if commands := server.Commands(t); commands["eval"] != 3 || commands["evalsha"] != 21 {
		t.Errorf("%d evals and %d evalshas, want 3 (each script once, one again after the flush) and 21",
			commands["eval"], commands["evalsha"])
	}
}

func TestStoreAway(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	server.Kill()
	_, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: newToken(), Lease: time.Second})
	away, ok := errors.AsType[*lock.UnavailableError](err)
	if !ok || !errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrHeld) {
		t.Fatalf("acquire: %v, want unavailable", err)
	}
	if away.Doubtful {
		t.Errorf("a refused connection (%v) counts as doubtful", err)
	}
	server.Restart(t)
	token := newToken()
	if _, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: token, Lease: time.Second}); err != nil {
		t.Fatalf("acquire after the restart: %v", err)
	}
}

// The server drops every connection behind the Store's back: the next operation finds out
// and goes through all the same.
func TestBrokenConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	for range 10 {
		token := newToken()
		if _, err := store.Acquire(t.Context(), mainKey, lock.Claim{Token: token, Lease: time.Minute}); err != nil {
			t.Fatal(err)
		}
		server.Client.Do(t.Context(), "client", "kill", "type", "normal", "skipme", "yes")
		if err := giveBack(t, store, mainKey, token); err != nil {
			t.Fatal(err)
		}
		server.Client.Do(t.Context(), "client", "kill", "type", "normal", "skipme", "yes")
	}
}
