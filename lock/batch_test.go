package lock_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// renewing starts a server and acquires n locks there.
func renewing(t *testing.T, n int) (*redistest.Server, lock.Store, []string, lock.Token) {
	t.Helper()
	server := redistest.Start(t)
	store := openGetSet(t, server)
	token := newToken()
	return server, store, acquireAll(t, store, n, token), token
}

// renewAll renews n locks at the same time and returns the errors.
func renewAll(t *testing.T, store lock.Store, keys []string, token lock.Token, patience time.Duration) []error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	errs := make([]error, len(keys))
	var wg sync.WaitGroup
	for i, key := range keys {
		wg.Go(func() { _, errs[i] = store.Renew(ctx, key, lock.Claim{Token: token, Lease: time.Minute}) })
	}
	wg.Wait()
	return errs
}

func acquireAll(t *testing.T, store lock.Store, n int, token lock.Token) (keys []string) {
	t.Helper()
	for i := range n {
		key := lock.Key("lock.", string(rune('a'+i%26))+string(rune('a'+i/26)))
		if _, err := store.Acquire(t.Context(), key, lock.Claim{Token: token, Lease: time.Minute}); err != nil {
			t.Fatal(err)
		}
		keys = append(keys, key)
	}
	return keys
}

func TestRenewalsGoTogether(t *testing.T) {
	t.Parallel()
	server, store, keys, token := renewing(t, 200)
	server.Client.ScriptFlush(t.Context()) // as after a restart
	lost := newToken()
	server.Client.HSet(t.Context(), "{"+keys[7]+"}:holder", "t", string(lost))

	for i, err := range renewAll(t, store, keys, token, time.Minute) {
		if i == 7 {
			if !errors.Is(err, lock.ErrLost) {
				t.Errorf("renewal of a lock that is another's: %v", err)
			}
		} else if err != nil {
			t.Errorf("renewal %d: %v", i, err)
		}
	}
	reads := server.Reads(t)
	renewAll(t, store, keys, token, time.Minute)
	if reads = server.Reads(t) - reads; reads > len(keys)/4 {
		t.Errorf("%d renewals at the same time took %d reads of the server", len(keys), reads)
	}
}

func TestRenewalsOfHungServer(t *testing.T) {
	t.Parallel()
	server, store, keys, token := renewing(t, 20)
	server.Pause()
	for i, err := range renewAll(t, store, keys, token, 100*time.Millisecond) {
		if !errors.Is(err, lock.ErrUnavailable) {
			t.Errorf("renewal %d of a server that hangs: %v", i, err)
		}
	}
	server.Resume()
	for i, err := range renewAll(t, store, keys, token, time.Minute) {
		if err != nil {
			t.Errorf("renewal %d afterwards: %v", i, err)
		}
	}
}

func TestRenewalsOverBrokenConnection(t *testing.T) {
	t.Parallel()
	server, store, keys, token := renewing(t, 20)
	for range 5 {
		server.Client.Do(t.Context(), "client", "kill", "type", "normal", "skipme", "yes")
		for i, err := range renewAll(t, store, keys, token, time.Minute) {
			if err != nil {
				t.Errorf("renewal %d: %v", i, err)
			}
		}
	}
}

func TestRenewalIsGivenUp(t *testing.T) {
	t.Parallel()
	server, store, keys, token := renewing(t, 2)
	server.Pause()
	ctx, giveUp := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, key := range keys {
		wg.Go(func() {
			if _, err := store.Renew(ctx, key, lock.Claim{Token: token, Lease: time.Minute}); !errors.Is(err, lock.ErrUnavailable) || !errors.Is(err, context.Canceled) {
				t.Errorf("renewal: %v", err)
			}
		})
	}
	giveUp()
	wg.Wait() // at once, and not when the server goes on
	server.Resume()
}

// until is a context that only says when it ends, as those of a Locker.
type until struct {
	context.Context
	deadline time.Time
}

func (c until) Deadline() (time.Time, bool) { return c.deadline, true }

// A call does not wait for the more patient ones that travel with it: the server goes on when the
// impatient one has left, and the others have their answers.
func TestImpatientCallTravelsWithPatientOnes(t *testing.T) {
	t.Parallel()
	server, store, keys, token := renewing(t, 20)
	server.Pause()
	renew := func(i int, patience time.Duration) error {
		ctx := until{context.Background(), time.Now().Add(patience)}
		_, err := store.Renew(ctx, keys[i], lock.Claim{Token: token, Lease: time.Minute})
		return err
	}
	var others sync.WaitGroup
	for i := range 2 { // both round trips
		others.Go(func() { _ = renew(i, 300*time.Millisecond) })
	}
	time.Sleep(50 * time.Millisecond) // or one of the patient ones is under way alone
	for i := 2; i < 10; i++ {
		others.Go(func() {
			if err := renew(i, time.Hour); err != nil {
				t.Errorf("a patient one: %v", err)
			}
		})
	}
	if err := renew(10, 400*time.Millisecond); !errors.Is(err, lock.ErrUnavailable) {
		t.Error(err)
	}
	server.Resume()
	others.Wait()
}
