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

// claim returns one of a process of its own, which waits.
func claim() lock.Claim { return lock.Claim{Token: newToken(), Lease: long, Wait: true} }

// wait puts the claim in line behind those that are there, and returns it with its place.
func (s *suite) wait(c lock.Claim) lock.Claim {
	s.Helper()
	_, err := s.Acquire(s.Context(), key, c)
	held, ok := errors.AsType[*lock.HeldError](err)
	if !ok || held.Place <= 0 || !held.NewPlace {
		s.Fatalf("acquire: %+v, want held with a new place", err)
	}
	c.Place = held.Place
	return c
}

// stillWaits asks again, and fails unless the claim is refused and has the same place.
func (s *suite) stillWaits(c lock.Claim) {
	s.Helper()
	_, err := s.Acquire(s.Context(), key, c)
	if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Place != c.Place || held.NewPlace {
		s.Fatalf("acquire by one in line: %+v, want held with the place that it has, %d", err, c.Place)
	}
}

// confirm asks for a lock that was handed over.
func (s *suite) confirm(c lock.Claim) lock.Grant {
	s.Helper()
	g, err := s.Acquire(s.Context(), key, c)
	if err != nil {
		s.Fatalf("acquire by the successor: %v", err)
	}
	if g.TTL < long-time.Second {
		s.Errorf("a hand-over that was confirmed lasts %v, want its lease of %v", g.TTL, long)
	}
	return g
}

func (s *suite) handOver(from, to lock.Claim) lock.Successor {
	s.Helper()
	next, err := s.Release(s.Context(), key, from)
	if err != nil || next.Token != to.Token {
		s.Fatalf("release: %v, %v; want it handed over to %v", next, err, to.Token)
	}
	return next
}

func (s *suite) servesInOrder() {
	process := lock.NewProcess()
	holder := lock.Claim{Token: process.NewToken(), Lease: long}
	last := s.acquire(key, holder.Token, long).Fence
	claims := []lock.Claim{holder}
	for i := range 6 {
		c := claim()
		if i%3 == 0 {
			c.Token = process.NewToken() // of the holder's process
		}
		claims = append(claims, s.wait(c))
	}
	for i, c := range claims[1:] {
		if i > 0 && c.Place <= claims[i].Place {
			s.Errorf("place %d after place %d", c.Place, claims[i].Place)
		}
		next := s.handOver(claims[i], c)
		if c.Token[:10] == claims[i].Token[:10] {
			if g := next.Grant; g.Fence <= last || g.TTL < long-time.Second {
				s.Errorf("handed over inside the process with the grant %+v, fence before: %d", g, last)
			}
		}
		for _, other := range claims[i+2:] {
			s.stillWaits(other)
		}
		g := s.confirm(c)
		if g.Fence <= last {
			s.Errorf("fence %d after %d", g.Fence, last)
		}
		last = g.Fence
	}
	s.release(key, claims[6].Token)
	s.acquire(key, newToken(), long)
}

func (s *suite) keepsOthersBehindLine() {
	holder := claim()
	s.acquire(key, holder.Token, long)
	first := s.wait(claim())
	second := s.wait(claim())
	s.handOver(holder, first)
	s.held(key, newToken(), lock.Held, long+2*time.Second)
	if err := s.Inspect(s.Context(), key); !errors.Is(err, lock.ErrHeld) {
		s.Errorf("inspect: %v, want held", err)
	}
	s.confirm(first)
	if err := s.ForceRelease(s.Context(), key); err != nil {
		s.Fatal(err)
	}
	// A gap: nobody holds it, somebody waits.
	if err := s.Inspect(s.Context(), key); !errors.Is(err, lock.ErrHeld) {
		s.Errorf("inspect: %v, want held as long as somebody waits", err)
	}
	if _, err := s.Acquire(s.Context(), key, lock.Claim{Token: newToken(), Lease: long}); !errors.Is(err, lock.ErrHeld) {
		s.Errorf("acquire by another: %v, want held as long as somebody waits", err)
	}
	s.confirm(second)
}

func (s *suite) leavesLine() {
	holder := claim()
	s.acquire(key, holder.Token, long)
	first, second := s.wait(claim()), s.wait(claim())
	s.lost(s.give(first), lock.NotOwner)
	s.handOver(holder, second)
	s.confirm(second)
	next, err := s.Release(s.Context(), key, second)
	if err != nil || next.Token != "" {
		s.Errorf("release: %v, %v; want nobody to be left in line", next, err)
	}
	s.acquire(key, newToken(), long)
}

// give releases a claim that may be in line.
func (s *suite) give(c lock.Claim) error {
	_, err := s.Release(s.Context(), key, c)
	return err
}

func (s *suite) handsOnUnwanted() {
	holder := claim()
	s.acquire(key, holder.Token, long)
	first, second := s.wait(claim()), s.wait(claim())
	s.handOver(holder, first)
	s.handOver(first, second) // it had left before it knew
	s.confirm(second)
}

func (s *suite) restoresPlace() {
	holder := claim()
	s.acquire(key, holder.Token, long)
	first, second := s.wait(claim()), s.wait(claim())
	s.lost(s.give(first), lock.NotOwner) // stands for a Store that lost it
	if again := s.wait(first); again.Place != first.Place {
		s.Errorf("place %d, and %d when it is taken again", first.Place, again.Place)
	}
	s.handOver(holder, first)
	s.confirm(first)
	s.handOver(first, second)
}

func (s *suite) linesUpOnly() {
	only := claim()
	only.LineUp = true
	s.wait(only)
	if err := s.Inspect(s.Context(), key); !errors.Is(err, lock.ErrHeld) {
		s.Errorf("inspect: %v, want held", err)
	}
	_, err := s.Acquire(s.Context(), key, only)
	if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Why != lock.Free {
		s.Errorf("lining up for a lock that nobody holds: %v, want held (free)", err)
	}
	only.LineUp = false
	s.confirm(only)
}

func (s *suite) handsOverFree() {
	holder := claim()
	s.acquire(key, holder.Token, long)
	first := s.wait(claim())
	if err := s.ForceRelease(s.Context(), key); err != nil {
		s.Fatal(err)
	}
	s.wait(claim()) // its question hands the lock over to the first
	_, err := s.Renew(s.Context(), key, first)
	if err != nil {
		s.Errorf("renew by the first in line: %v, want it to have the lock", err)
	}
	s.confirm(first)
}

// The first in line was handed the lock and never asks: the next one gets it soon, in place of
// all of its process.
func (s *suite) passesByDeaf() {
	deaf := lock.NewProcess()
	holder := claim()
	s.acquire(key, holder.Token, long)
	first := claim()
	first.Token = deaf.NewToken()
	first = s.wait(first)
	another := claim()
	another.Token = deaf.NewToken()
	another = s.wait(another)
	last := s.wait(claim())
	s.handOver(holder, first)
	if !s.forgetsDead(last) {
		s.confirm(first) // where nobody in line can die
		return
	}
	if again := s.wait(another); again.Place != another.Place {
		s.Errorf("place %d, and %d when it is taken again", another.Place, again.Place)
	}
	s.handOver(last, another)
}

// forgetsDead is true if last gets the lock although two stand before it.
func (s *suite) forgetsDead(last lock.Claim) bool {
	s.Helper()
	giveUp := time.Now().Add(time.Minute)
	for time.Now().Before(giveUp) {
		_, err := s.Acquire(s.Context(), key, last)
		if err == nil {
			return true
		}
		held, ok := errors.AsType[*lock.HeldError](err)
		if !ok {
			s.Fatal(err)
		}
		if held.For > 4*time.Second {
			return false
		}
		time.Sleep(min(held.For, 50*time.Millisecond))
	}
	s.Fatal("the lock stays with a process that does not ask")
	return false
}

func (s *suite) tellsOfHandOver() {
	process := lock.NewProcess()
	listening, handed := make(chan bool, 10), make(chan lock.Token, 10)
	s.Listen(process, lock.Listener{
		Handed:    func(token lock.Token) { handed <- token },
		Listening: func(on bool, err error) { listening <- on },
	})
	if on := <-listening; !on {
		s.Fatal("the Store does not tell of hand-overs")
	}
	holder := claim()
	s.acquire(key, holder.Token, long)
	c := claim()
	c.Token = process.NewToken()
	c = s.wait(c)
	s.handOver(holder, c)
	if token := <-handed; token != c.Token {
		s.Errorf("told of %v, want %v", token, c.Token)
	}
}

func (s *suite) lateOwnerHandsNothingOver() {
	late := lock.Claim{Token: newToken(), Lease: shortest}
	s.acquire(key, late.Token, shortest)
	s.awaitExpiry(key)
	next := claim()
	s.acquire(key, next.Token, long)
	s.wait(claim())
	if successor, err := s.Release(s.Context(), key, late); err == nil || successor.Token != "" {
		s.Errorf("release of a lock that is another's: %v, %v", successor, err)
	}
	if _, err := s.Renew(s.Context(), key, next); err != nil {
		s.Errorf("renew by the holder: %v", err)
	}
}
