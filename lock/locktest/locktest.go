// Package locktest says what a [lock.Store] must do, as tests: every Store passes it.
package locktest

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// shortest is the shortest lease that a Store must know.
const shortest = time.Second

// long is a lease that does not end during a test.
const long = time.Hour

// TestStore runs the suite. world is called once for each test and returns a function that
// opens Stores, all of which see the same locks, and none of another test's.
func TestStore(t *testing.T, world func(t *testing.T) (open func() lock.Store)) {
	for name, test := range map[string]func(*suite){
		"free lock is granted":                     (*suite).grantsFreeLock,
		"held lock is refused to others":           (*suite).refusesHeldLock,
		"one of many gets it":                      (*suite).grantsOneOfMany,
		"repeated acquire repeats its answer":      (*suite).repeatsAcquire,
		"repeated acquire after a release is new":  (*suite).tokenIsNotRemembered,
		"keys are independent":                     (*suite).keysAreIndependent,
		"any key":                                  (*suite).takesAnyKey,
		"released lock is free":                    (*suite).releaseFrees,
		"release needs the token":                  (*suite).releaseNeedsToken,
		"second release is not the owner's":        (*suite).secondRelease,
		"expired lock is taken over":               (*suite).takesOverExpired,
		"late release leaves the next holder":      (*suite).lateRelease,
		"renew prolongs":                           (*suite).renewProlongs,
		"renew never shortens":                     (*suite).renewNeverShortens,
		"renew needs the token":                    (*suite).renewNeedsToken,
		"renew does not revive":                    (*suite).renewDoesNotRevive,
		"fence grows":                              (*suite).fenceGrows,
		"inspect says what acquire would":          (*suite).inspects,
		"force release frees, holder learns of it": (*suite).forceReleases,
		"line is first come, first served":         (*suite).servesInOrder,
		"nobody overtakes the line":                (*suite).keepsOthersBehindLine,
		"leaving the line leaves no trace":         (*suite).leavesLine,
		"one who leaves hands on":                  (*suite).handsOnUnwanted,
		"a lost place is taken again":              (*suite).restoresPlace,
		"lining up takes no lock":                  (*suite).linesUpOnly,
		"free lock goes to the first in line":      (*suite).handsOverFree,
		"a process that does not ask is passed by": (*suite).passesByDeaf,
		"hand-over is told":                        (*suite).tellsOfHandOver,
		"late owner hands nothing over":            (*suite).lateOwnerHandsNothingOver,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			open := world(t)
			test(&suite{T: t, open: open, Store: open()})
		})
	}
}

// newToken returns a token of a process of its own.
func newToken() lock.Token { return lock.NewProcess().NewToken() }

// suite is one test: a Store and what to do with it.
type suite struct {
	*testing.T
	lock.Store
	open func() lock.Store
}

const key = "lock.conformance"

func (s *suite) grantsFreeLock() {
	g := s.acquire(key, newToken(), 30*time.Second)
	if g.Fence <= 0 {
		s.Errorf("fence %d, want more than 0", g.Fence)
	}
	// Whole seconds may make it longer, never shorter.
	if g.TTL < 29*time.Second || g.TTL > 32*time.Second {
		s.Errorf("lock lasts %v, want about 30s", g.TTL)
	}
}

func (s *suite) refusesHeldLock() {
	s.acquire(key, newToken(), 30*time.Second)
	s.held(key, newToken(), lock.Held, 32*time.Second)
	other := s.open()
	_, err := other.Acquire(s.Context(), key, lock.Claim{Token: newToken(), Lease: long})
	if !errors.Is(err, lock.ErrHeld) {
		s.Errorf("through another Store: %v, want held", err)
	}
}

func (s *suite) grantsOneOfMany() {
	const callers = 32
	var wg sync.WaitGroup
	granted := make(chan lock.Grant, callers)
	for range callers {
		wg.Go(func() {
			g, err := s.Acquire(s.Context(), key, lock.Claim{Token: newToken(), Lease: long})
			switch {
			case err == nil:
				granted <- g
			case !errors.Is(err, lock.ErrHeld):
				s.Errorf("acquire: %v", err)
			}
		})
	}
	wg.Wait()
	if len(granted) != 1 {
		s.Errorf("%d of %d callers have the lock, want 1", len(granted), callers)
	}
}

func (s *suite) repeatsAcquire() {
	token := newToken()
	first := s.acquire(key, token, long)
	again := s.acquire(key, token, long)
	if again.Fence != first.Fence {
		s.Errorf("fence %d, and %d when asked again: want the same", first.Fence, again.Fence)
	}
	if again.TTL > first.TTL+time.Second { // a Store may round a new lock's down
		s.Errorf("asking again made the lock longer: %v, then %v", first.TTL, again.TTL)
	}
	s.release(key, token)
	s.acquire(key, newToken(), long)
}

func (s *suite) tokenIsNotRemembered() {
	token := newToken()
	first := s.acquire(key, token, long)
	s.release(key, token)
	if again := s.acquire(key, token, long); again.Fence <= first.Fence {
		s.Errorf("fence %d after %d, want a larger one", again.Fence, first.Fence)
	}
}

func (s *suite) keysAreIndependent() {
	one, other := newToken(), newToken()
	s.acquire(key, one, long)
	s.acquire(key+"2", other, long)
	s.release(key, one)
	s.held(key+"2", newToken(), lock.Held, long+2*time.Second)
}

func (s *suite) takesAnyKey() {
	for i, name := range []string{"", " ", "a b", "ünïcödé", "\xff\xfe", "a\x00b", "{tag}", "100%", "x\r\nDEL x"} {
		k := lock.Key(fmt.Sprintf("lock.%d.", i), name)
		token := newToken()
		s.acquire(k, token, long)
		s.held(k, newToken(), lock.Held, long+2*time.Second)
		s.release(k, token)
	}
}

func (s *suite) releaseFrees() {
	for range 20 { // within one second, where a value of whole seconds tells nobody apart
		token := newToken()
		s.acquire(key, token, long)
		s.release(key, token)
	}
}

func (s *suite) releaseNeedsToken() {
	s.lost(s.giveBack(key, newToken()), lock.NotOwner)
	s.acquire(key, newToken(), long)
	s.lost(s.giveBack(key, newToken()), lock.NotOwner)
	s.held(key, newToken(), lock.Held, long+2*time.Second)
}

func (s *suite) secondRelease() {
	token := newToken()
	s.acquire(key, token, long)
	s.release(key, token)
	s.acquire(key, newToken(), long)
	s.lost(s.giveBack(key, token), lock.NotOwner)
	s.held(key, newToken(), lock.Held, long+2*time.Second)
}

func (s *suite) takesOverExpired() {
	first := s.acquire(key, newToken(), shortest)
	if next := s.acquireExpired(key, newToken()); next.Fence <= first.Fence {
		s.Errorf("fence %d after %d, want a larger one", next.Fence, first.Fence)
	}
}

func (s *suite) lateRelease() {
	late, next := newToken(), newToken()
	s.acquire(key, late, shortest)
	s.acquireExpired(key, next)
	s.lost(s.giveBack(key, late), lock.NotOwner)
	s.held(key, newToken(), lock.Held, long+2*time.Second)
	s.release(key, next)
}

func (s *suite) renewProlongs() {
	token := newToken()
	first := s.acquire(key, token, shortest)
	renewed, err := s.Renew(s.Context(), key, lock.Claim{Token: token, Lease: long})
	if err != nil {
		s.Fatalf("renew: %v", err)
	}
	if renewed.TTL < long-time.Second || renewed.TTL > long+2*time.Second {
		s.Errorf("lock lasts %v after a renewal for %v", renewed.TTL, long)
	}
	if renewed.Fence != first.Fence {
		s.Errorf("fence %d, and %d after a renewal: want the same", first.Fence, renewed.Fence)
	}
	s.held(key, newToken(), lock.Held, long+2*time.Second)
	s.release(key, token)
}

func (s *suite) renewNeverShortens() {
	token := newToken()
	s.acquire(key, token, long)
	renewed, err := s.Renew(s.Context(), key, lock.Claim{Token: token, Lease: shortest})
	if err != nil {
		s.Fatalf("renew: %v", err)
	}
	if renewed.TTL < long-time.Minute {
		s.Errorf("a renewal shortened the lock from %v to %v", long, renewed.TTL)
	}
}

func (s *suite) renewNeedsToken() {
	_, err := s.Renew(s.Context(), key, lock.Claim{Token: newToken(), Lease: long})
	s.lost(err, lock.NotOwner)
	token := newToken()
	s.acquire(key, token, long)
	_, err = s.Renew(s.Context(), key, lock.Claim{Token: newToken(), Lease: long})
	s.lost(err, lock.NotOwner)
	s.release(key, token)
}

func (s *suite) renewDoesNotRevive() {
	token := newToken()
	s.acquire(key, token, shortest)
	s.awaitExpiry(key)
	_, err := s.Renew(s.Context(), key, lock.Claim{Token: token, Lease: long})
	s.lost(err, lock.Expired)
	s.lost(s.giveBack(key, token), lock.Expired)
	s.acquire(key, newToken(), long)
}

func (s *suite) fenceGrows() {
	var last int64
	for range 50 {
		token := newToken()
		g := s.acquire(key, token, long)
		if g.Fence <= last {
			s.Fatalf("fence %d after %d, want a larger one", g.Fence, last)
		}
		last = g.Fence
		s.release(key, token)
	}
}

func (s *suite) inspects() {
	if err := s.Inspect(s.Context(), key); err != nil {
		s.Errorf("inspect of a free lock: %v", err)
	}
	token := newToken()
	s.acquire(key, token, long)
	held, ok := errors.AsType[*lock.HeldError](s.Inspect(s.Context(), key))
	if !ok || held.For < long-time.Second || held.For > long+2*time.Second {
		s.Errorf("inspect of a lock held for %v: %+v", long, held)
	}
	s.release(key, token)
	if err := s.Inspect(s.Context(), key); err != nil {
		s.Errorf("inspect of a released lock: %v", err)
	}
}

func (s *suite) forceReleases() {
	if err := s.ForceRelease(s.Context(), key); err != nil {
		s.Errorf("force release of a free lock: %v", err)
	}
	token := newToken()
	first := s.acquire(key, token, long)
	if err := s.ForceRelease(s.Context(), key); err != nil {
		s.Fatalf("force release: %v", err)
	}
	_, err := s.Renew(s.Context(), key, lock.Claim{Token: token, Lease: long})
	s.lost(err, lock.NotOwner)
	if next := s.acquire(key, newToken(), long); next.Fence <= first.Fence {
		s.Errorf("fence %d after a force release of %d, want a larger one", next.Fence, first.Fence)
	}
	s.lost(s.giveBack(key, token), lock.NotOwner)
}

func (s *suite) acquire(key string, token lock.Token, lease time.Duration) lock.Grant {
	s.Helper()
	g, err := s.Acquire(s.Context(), key, lock.Claim{Token: token, Lease: lease})
	if err != nil {
		s.Fatalf("acquire: %v", err)
	}
	return g
}

// acquireExpired takes a lock whose holder's lease ends soon.
func (s *suite) acquireExpired(key string, token lock.Token) lock.Grant {
	s.Helper()
	s.awaitExpiry(key)
	return s.acquire(key, token, long)
}

// awaitExpiry waits, as the Store says, until the lock is free; a minute at most.
func (s *suite) awaitExpiry(key string) {
	s.Helper()
	giveUp := time.Now().Add(time.Minute)
	for {
		err := s.Inspect(s.Context(), key)
		held, ok := errors.AsType[*lock.HeldError](err)
		if !ok {
			if err != nil {
				s.Fatalf("inspect: %v", err)
			}
			return
		}
		if held.For <= 0 || held.For > 4*time.Second || time.Now().After(giveUp) {
			s.Fatalf("a lock for %v is held for another %v", shortest, held.For)
		}
		time.Sleep(min(held.For, 50*time.Millisecond))
	}
}

// giveBack releases as if there were no line.
func (s *suite) giveBack(key string, token lock.Token) error {
	_, err := s.Release(s.Context(), key, lock.Claim{Token: token, Lease: long})
	return err
}

func (s *suite) release(key string, token lock.Token) {
	s.Helper()
	if err := s.giveBack(key, token); err != nil {
		s.Fatalf("release: %v", err)
	}
}

func (s *suite) held(key string, token lock.Token, why lock.Reason, atMost time.Duration) {
	s.Helper()
	_, err := s.Acquire(s.Context(), key, lock.Claim{Token: token, Lease: long})
	held, ok := errors.AsType[*lock.HeldError](err)
	if !ok || !errors.Is(err, lock.ErrHeld) || held.Why != why || held.For <= 0 || held.For > atMost {
		s.Errorf("acquire: %+v, want held (%s) for at most %v", err, why, atMost)
	}
}

func (s *suite) lost(err error, why lock.Reason) {
	s.Helper()
	lost, ok := errors.AsType[*lock.LostError](err)
	if !ok || !errors.Is(err, lock.ErrLost) || lost.Why != why {
		s.Errorf("got %v, want lost (%s)", err, why)
	}
}
