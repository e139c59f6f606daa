// Package locktest says what a [lock.Store] must do, as tests: every Store passes it.
package locktest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// shortest is the shortest lease that a Store must know.
const shortest = time.Second

// long is a lease that does not end during a test.
const long = time.Hour

// An Ability is something that not every Store has.
type Ability string

const (
	Fences         Ability = "a fencing token that grows with every lock taken"
	Line           Ability = "one line for all processes, first come, first served"
	Deliveries     Ability = "a delivery that was handled is known (`dedupe`)"
	Newest         Ability = "the newest takes the place of the one that waits (`supersede`)"
	OutlivesServer Ability = "a lock outlives the loss of one server" // needs a World's LoseServer

	// Of Stores whose keys others can delete, each has one of these. They need a World's LoseKey.
	OutlivesKey Ability = "a lock whose key is lost stays its holder's"
	EndsWithKey Ability = "a lock whose key is lost is free at once"
)

// Abilities has all of them.
var Abilities = []Ability{Fences, Line, Deliveries, Newest, OutlivesServer, OutlivesKey, EndsWithKey}

// A World is where locks are.
type World struct {
	// Open opens a Store; all of them see the same locks.
	Open func() lock.Store

	// LoseKey removes a lock's key, and nothing that the Store keeps beside it. Nil where
	// nobody can.
	LoseKey func(key string)

	// LoseServer ends one of the servers for good, with all that it knows. Nil where the others
	// could not go on.
	LoseServer func()
}

// TestStore runs the suite for a Store with the given abilities. The tests share the world: each
// has a key of its own.
func TestStore(t *testing.T, abilities []Ability, world World) {
	always := map[string]func(*suite){
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
		"inspect says what acquire would":          (*suite).inspects,
		"force release frees, holder learns of it": (*suite).forceReleases,
	}
	byAbility := map[Ability]map[string]func(*suite){
		Fences: {
			"fence grows": (*suite).fenceGrows,
		},
		Line: {
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
		},
		Deliveries: {
			"delivery is handled once":                (*suite).handlesOnce,
			"delivery that failed may be tried again": (*suite).triesFailedAgain,
			"delivery under way is told from others":  (*suite).tellsSameDelivery,
			"delivery in line hears what came of it":  (*suite).decidesInLine,
			"delivery is noted without the lock":      (*suite).notesDoneWithoutLock,
		},
		Newest: {
			"newest wins":                          (*suite).newestWins,
			"newest keeps its place":               (*suite).newestKeepsPlace,
			"delivery sent again displaces nobody": (*suite).redeliveryDisplacesNobody,
			"lost place is told":                   (*suite).tellsSuperseded,
		},
		OutlivesServer: {
			"lost server is not missed": (*suite).outlivesServer,
		},
		OutlivesKey: {
			"lost key frees nothing": (*suite).outlivesKey,
		},
		EndsWithKey: {
			"lost key frees, holder learns of it": (*suite).endsWithKey,
		},
	}
	tests := always
	for _, ability := range abilities {
		maps.Copy(tests, byAbility[ability])
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			key := "lock." + t.Name()
			test(&suite{T: t, World: world, Store: world.Open(), key: key, fences: slices.Contains(abilities, Fences)})
		})
	}
}

// newToken returns a token of a process of its own.
func newToken() lock.Token { return lock.NewProcess().NewToken() }

// suite is one test: a Store and what to do with it.
type suite struct {
	*testing.T
	lock.Store
	World
	key    string
	fences bool
}

func (s *suite) grantsFreeLock() {
	g := s.acquire(s.key, newToken(), 30*time.Second)
	// Whole seconds may make it longer, never shorter.
	if g.TTL < 29*time.Second || g.TTL > 32*time.Second {
		s.Errorf("lock lasts %v, want about 30s", g.TTL)
	}
}

func (s *suite) refusesHeldLock() {
	s.acquire(s.key, newToken(), 30*time.Second)
	s.held(s.key, newToken(), lock.Held, 32*time.Second)
	other := s.Open()
	_, err := other.Acquire(s.Context(), s.key, lock.Claim{Token: newToken(), Lease: long})
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
			g, err := s.Acquire(s.Context(), s.key, lock.Claim{Token: newToken(), Lease: long})
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
	first := s.acquire(s.key, token, long)
	again := s.acquire(s.key, token, long)
	if again.Fence != first.Fence {
		s.Errorf("fence %d, and %d when asked again: want the same", first.Fence, again.Fence)
	}
	if again.TTL > first.TTL+time.Second { // a Store may round a new lock's down
		s.Errorf("asking again made the lock longer: %v, then %v", first.TTL, again.TTL)
	}
	s.release(s.key, token)
	s.acquire(s.key, newToken(), long)
}

func (s *suite) tokenIsNotRemembered() {
	token := newToken()
	first := s.acquire(s.key, token, long)
	s.release(s.key, token)
	s.later(first, s.acquire(s.key, token, long))
}

func (s *suite) keysAreIndependent() {
	one, other := newToken(), newToken()
	s.acquire(s.key, one, long)
	s.acquire(s.key+"2", other, long)
	s.release(s.key, one)
	s.held(s.key+"2", newToken(), lock.Held, long+2*time.Second)
}

func (s *suite) takesAnyKey() {
	for i, name := range []string{"", " ", "a b", "ünïcödé", "\xff\xfe", "a\x00b", "{tag}", "100%", "x\r\nDEL x"} {
		k := lock.Key(fmt.Sprintf("%s.%d.", s.key, i), name)
		token := newToken()
		s.acquire(k, token, long)
		s.held(k, newToken(), lock.Held, long+2*time.Second)
		s.release(k, token)
	}
}

func (s *suite) releaseFrees() {
	for range 20 { // within one second, where a value of whole seconds tells nobody apart
		token := newToken()
		s.acquire(s.key, token, long)
		s.release(s.key, token)
	}
}

func (s *suite) releaseNeedsToken() {
	s.lost(s.giveBack(s.key, newToken()), lock.NotOwner)
	s.acquire(s.key, newToken(), long)
	s.lost(s.giveBack(s.key, newToken()), lock.NotOwner)
	s.held(s.key, newToken(), lock.Held, long+2*time.Second)
}

func (s *suite) secondRelease() {
	token := newToken()
	s.acquire(s.key, token, long)
	s.release(s.key, token)
	s.acquire(s.key, newToken(), long)
	s.lost(s.giveBack(s.key, token), lock.NotOwner)
	s.held(s.key, newToken(), lock.Held, long+2*time.Second)
}

func (s *suite) takesOverExpired() {
	first := s.acquire(s.key, newToken(), shortest)
	s.later(first, s.acquireExpired(s.key, newToken()))
}

func (s *suite) lateRelease() {
	late, next := newToken(), newToken()
	s.acquire(s.key, late, shortest)
	s.acquireExpired(s.key, next)
	s.lost(s.giveBack(s.key, late), lock.NotOwner)
	s.held(s.key, newToken(), lock.Held, long+2*time.Second)
	s.release(s.key, next)
}

func (s *suite) renewProlongs() {
	token := newToken()
	first := s.acquire(s.key, token, shortest)
	renewed, err := s.Renew(s.Context(), s.key, lock.Claim{Token: token, Lease: long})
	if err != nil {
		s.Fatalf("renew: %v", err)
	}
	if renewed.TTL < long-time.Second || renewed.TTL > long+2*time.Second {
		s.Errorf("lock lasts %v after a renewal for %v", renewed.TTL, long)
	}
	if renewed.Fence != first.Fence {
		s.Errorf("fence %d, and %d after a renewal: want the same", first.Fence, renewed.Fence)
	}
	s.held(s.key, newToken(), lock.Held, long+2*time.Second)
	s.release(s.key, token)
}

func (s *suite) renewNeverShortens() {
	token := newToken()
	s.acquire(s.key, token, long)
	renewed, err := s.Renew(s.Context(), s.key, lock.Claim{Token: token, Lease: shortest})
	if err != nil {
		s.Fatalf("renew: %v", err)
	}
	if renewed.TTL < long-time.Minute {
		s.Errorf("a renewal shortened the lock from %v to %v", long, renewed.TTL)
	}
}

func (s *suite) renewNeedsToken() {
	_, err := s.Renew(s.Context(), s.key, lock.Claim{Token: newToken(), Lease: long})
	s.lost(err, lock.NotOwner)
	token := newToken()
	s.acquire(s.key, token, long)
	_, err = s.Renew(s.Context(), s.key, lock.Claim{Token: newToken(), Lease: long})
	s.lost(err, lock.NotOwner)
	s.release(s.key, token)
}

func (s *suite) renewDoesNotRevive() {
	token := newToken()
	s.acquire(s.key, token, shortest)
	s.awaitExpiry(s.key)
	_, err := s.Renew(s.Context(), s.key, lock.Claim{Token: token, Lease: long})
	s.lost(err, lock.Expired)
	s.lost(s.giveBack(s.key, token), lock.Expired)
	s.acquire(s.key, newToken(), long)
}

func (s *suite) fenceGrows() {
	var last lock.Grant // fence 0
	for range 50 {
		token := newToken()
		g := s.acquire(s.key, token, long)
		s.later(last, g)
		last = g
		s.release(s.key, token)
	}
}

func (s *suite) inspects() {
	if err := s.Inspect(s.Context(), s.key, ""); err != nil {
		s.Errorf("inspect of a free lock: %v", err)
	}
	token := newToken()
	s.acquire(s.key, token, long)
	held, ok := errors.AsType[*lock.HeldError](s.Inspect(s.Context(), s.key, ""))
	if !ok || held.For < long-time.Second || held.For > long+2*time.Second {
		s.Errorf("inspect of a lock held for %v: %+v", long, held)
	}
	s.release(s.key, token)
	if err := s.Inspect(s.Context(), s.key, ""); err != nil {
		s.Errorf("inspect of a released lock: %v", err)
	}
}

func (s *suite) forceReleases() {
	if err := s.ForceRelease(s.Context(), s.key); err != nil {
		s.Errorf("force release of a free lock: %v", err)
	}
	token := newToken()
	first := s.acquire(s.key, token, long)
	if err := s.ForceRelease(s.Context(), s.key); err != nil {
		s.Fatalf("force release: %v", err)
	}
	_, err := s.Renew(s.Context(), s.key, lock.Claim{Token: token, Lease: long})
	s.lost(err, lock.NotOwner)
	s.later(first, s.acquire(s.key, newToken(), long))
	s.lost(s.giveBack(s.key, token), lock.NotOwner)
}

func (s *suite) outlivesKey() {
	token := newToken()
	first := s.acquire(s.key, token, long)
	s.LoseKey(s.key)
	_, err := s.Renew(s.Context(), s.key, lock.Claim{Token: token, Lease: long})
	s.lost(err, lock.MainGone)
	s.held(s.key, newToken(), lock.OwnerLive, long+2*time.Second)
	s.lost(s.giveBack(s.key, token), lock.MainGone)
	s.later(first, s.acquire(s.key, newToken(), long))
}

func (s *suite) endsWithKey() {
	token := newToken()
	first := s.acquire(s.key, token, long)
	s.LoseKey(s.key)
	_, err := s.Renew(s.Context(), s.key, lock.Claim{Token: token, Lease: long})
	s.lost(err, lock.MainGone)
	next := newToken()
	s.later(first, s.acquire(s.key, next, long))
	s.lost(s.giveBack(s.key, token), lock.NotOwner)
	s.release(s.key, next)
}

func (s *suite) outlivesServer() {
	token := newToken()
	s.acquire(s.key, token, shortest)
	s.LoseServer()
	if _, err := s.Renew(s.Context(), s.key, lock.Claim{Token: token, Lease: long}); err != nil {
		s.Errorf("renew: %v", err)
	}
	s.held(s.key, newToken(), lock.Held, long+2*time.Second)
	s.release(s.key, token)
	s.acquire(s.key, newToken(), long)
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
		err := s.Inspect(s.Context(), key, "")
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

// later fails unless the next one's fence is larger than the one before.
func (s *suite) later(before, next lock.Grant) {
	s.Helper()
	if s.fences && next.Fence <= before.Fence {
		s.Errorf("fence %d after %d, want a larger one", next.Fence, before.Fence)
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
