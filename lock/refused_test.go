package lock_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// A server that turns everybody away says why, and is known not to have run anything.
func TestServerTurnsAway(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	server.Client.ConfigSet(t.Context(), "maxclients", "1") // the test's own
	_, err := openGetSet(t, server).Acquire(t.Context(), mainKey, lock.Claim{Token: newToken(), Lease: time.Minute})
	wantError(t, err, lock.ErrUnavailable)
	if away, ok := errors.AsType[*lock.UnavailableError](err); !ok || away.Doubtful || !strings.Contains(err.Error(), "max number of clients") {
		t.Errorf("error %#v: %v", away, err)
	}
}

// A user lacks the right to a command in the middle of a script, which leaves a key without an owner
// behind. That is an outage, and no contention, until the user has the right.
func TestRightLackingInScript(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, "--user", "locker", "on", "nopass", "~*", "&*", "+@all", "-pexpireat")
	var outages, recoveries atomic.Int32
	reach := clientOptions(server.Addr)
	reach.Username, reach.Password = "locker", "any"
	l := lock.New(over(t, lock.NewGetSet, reach)(), lock.Options{
		OnOutage: func(error) { outages.Add(1) }, OnRecovery: func(time.Duration) { recoveries.Add(1) },
	})
	for range 3 {
		_, err := l.Acquire(t.Context(), "name", lock.Wait(time.Minute), lock.Lease(time.Hour))
		wantError(t, err, lock.ErrUnavailable)
	}
	if n := server.Client.Exists(t.Context(), "lock.name").Val(); n != 1 {
		t.Fatal("nothing was left behind: this test sees nothing")
	}
	if outages.Load() != 1 || recoveries.Load() != 0 {
		t.Errorf("%d outages, %d recoveries", outages.Load(), recoveries.Load())
	}
	server.Client.Do(t.Context(), "acl", "setuser", "locker", "+pexpireat")
	release(t, acquire(t, l, "other"))
	_, err := l.Acquire(t.Context(), "name")
	wantError(t, err, lock.ErrHeld) // as from now on it may be anybody's
	if recoveries.Load() != 1 {
		t.Errorf("%d recoveries, want one", recoveries.Load())
	}
}

// A server that takes no writes answers a release of what was never there. It is away all the same.
func TestServerTakesNoWrites(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	server.Client.ConfigSet(t.Context(), "maxmemory", "1")
	var outages, recoveries atomic.Int32
	l := lock.New(openGetSet(t, server), lock.Options{
		OnOutage: func(error) { outages.Add(1) }, OnRecovery: func(time.Duration) { recoveries.Add(1) },
	})
	_, err := openGetSet(t, server).Acquire(t.Context(), mainKey, lock.Claim{Token: newToken(), Lease: time.Minute})
	if away, ok := errors.AsType[*lock.UnavailableError](err); !ok || away.Doubtful {
		t.Errorf("%v counts as doubtful", err)
	}
	for range 3 {
		_, err := l.Acquire(t.Context(), "name")
		wantError(t, err, lock.ErrUnavailable)
	}
	if outages.Load() != 1 || recoveries.Load() != 0 {
		t.Errorf("%d outages, %d recoveries", outages.Load(), recoveries.Load())
	}
	server.Client.ConfigSet(t.Context(), "maxmemory", "0")
	release(t, acquire(t, l, "name"))
	if recoveries.Load() != 1 {
		t.Errorf("%d recoveries, want one", recoveries.Load())
	}
}

// What a server says about one key says nothing about the others, nor that it is away.
func TestOneKeyIsRefused(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	server.AddUser(t, "locker", "~lock.*", "~{lock.*", "&*", "+@all")
	reach := clientOptions(server.Addr)
	reach.Username, reach.Password = "locker", "pass"
	var outages atomic.Int32
	l := lock.New(over(t, lock.NewGetSet, reach)(), lock.Options{OnOutage: func(error) { outages.Add(1) }})
	server.Client.Set(t.Context(), "{lock.bad}:holder", "x", 0)
	server.Client.Set(t.Context(), "lock.foreign", server.Now(t).Unix()+60, 0)
	for range 3 {
		for name, prefix := range map[string]string{"bad": "lock.", "any": "other."} {
			_, err := l.Acquire(t.Context(), name, lock.Prefix(prefix), lock.Wait(time.Millisecond))
			wantError(t, err, lock.ErrUnavailable)
			if away, ok := errors.AsType[*lock.UnavailableError](err); !ok || !away.ThisKey {
				t.Errorf("error %v, want one about the key", err)
			}
		}
		_, err := l.Acquire(t.Context(), "foreign", lock.OrLocal())
		wantError(t, err, lock.ErrHeld)
		release(t, acquire(t, l, "good"))
	}
	if outages.Load() != 0 {
		t.Errorf("%d outages", outages.Load())
	}
}
