package locktest

import (
	"errors"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// claim returns one of a process of its own, which waits.
func claim() lock.Claim { return lock.Claim{Token: newToken(), Lease: long, Wait: true} }

// wait puts the claim in line behind those that are there, and returns it with its place.
func (s *suite) wait(c lock.Claim) lock.Claim {
	s.Helper()
	_, err := s.Acquire(s.Context(), s.key, c)
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
	_, err := s.Acquire(s.Context(), s.key, c)
	if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Place != c.Place || held.NewPlace {
		s.Fatalf("acquire by one in line: %+v, want held with the place that it has, %d", err, c.Place)
	}
}

// confirm asks for a lock that was handed over.
func (s *suite) confirm(c lock.Claim) lock.Grant {
	s.Helper()
	g, err := s.Acquire(s.Context(), s.key, c)
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
	next, err := s.Release(s.Context(), s.key, from)
	if err != nil || next.Token != to.Token {
		s.Fatalf("release: %v, %v; want it handed over to %v", next, err, to.Token)
	}
	return next
}

func (s *suite) servesInOrder() {
	process := lock.NewProcess()
	holder := lock.Claim{Token: process.NewToken(), Lease: long}
	last := s.acquire(s.key, holder.Token, long)
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
			s.later(last, next.Grant)
			if next.Grant.TTL < long-time.Second {
				s.Errorf("handed over inside the process for %v", next.Grant.TTL)
			}
		}
		for _, other := range claims[i+2:] {
			s.stillWaits(other)
		}
		g := s.confirm(c)
		s.later(last, g)
		last = g
	}
	s.release(s.key, claims[6].Token)
	s.acquire(s.key, newToken(), long)
}

func (s *suite) keepsOthersBehindLine() {
	holder := claim()
	s.acquire(s.key, holder.Token, long)
	first := s.wait(claim())
	second := s.wait(claim())
	s.handOver(holder, first)
	s.held(s.key, newToken(), lock.Held, long+2*time.Second)
	if err := s.Inspect(s.Context(), s.key, ""); !errors.Is(err, lock.ErrHeld) {
		s.Errorf("inspect: %v, want held", err)
	}
	s.confirm(first)
	if err := s.ForceRelease(s.Context(), s.key); err != nil {
		s.Fatal(err)
	}
	// A gap: nobody holds it, somebody waits.
	if err := s.Inspect(s.Context(), s.key, ""); !errors.Is(err, lock.ErrHeld) {
		s.Errorf("inspect: %v, want held as long as somebody waits", err)
	}
	if _, err := s.Acquire(s.Context(), s.key, lock.Claim{Token: newToken(), Lease: long}); !errors.Is(err, lock.ErrHeld) {
		s.Errorf("acquire by another: %v, want held as long as somebody waits", err)
	}
	s.confirm(second)
}

func (s *suite) leavesLine() {
	holder := claim()
	s.acquire(s.key, holder.Token, long)
	first, second := s.wait(claim()), s.wait(claim())
	s.lost(s.give(first), lock.NotOwner)
	s.handOver(holder, second)
	s.confirm(second)
	next, err := s.Release(s.Context(), s.key, second)
	if err != nil || next.Token != "" {
		s.Errorf("release: %v, %v; want nobody to be left in line", next, err)
	}
	s.acquire(s.key, newToken(), long)
}

// give releases a claim that may be in line.
func (s *suite) give(c lock.Claim) error {
	_, err := s.Release(s.Context(), s.key, c)
	return err
}

func (s *suite) handsOnUnwanted() {
	holder := claim()
	s.acquire(s.key, holder.Token, long)
	first, second := s.wait(claim()), s.wait(claim())
	s.handOver(holder, first)
	s.handOver(first, second) // it had left before it knew
	s.confirm(second)
}

func (s *suite) restoresPlace() {
	holder := claim()
	s.acquire(s.key, holder.Token, long)
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
	if err := s.Inspect(s.Context(), s.key, ""); !errors.Is(err, lock.ErrHeld) {
		s.Errorf("inspect: %v, want held", err)
	}
	_, err := s.Acquire(s.Context(), s.key, only)
	if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Why != lock.Free {
		s.Errorf("lining up for a lock that nobody holds: %v, want held (free)", err)
	}
	only.LineUp = false
	s.confirm(only)
}

func (s *suite) handsOverFree() {
	holder := claim()
	s.acquire(s.key, holder.Token, long)
	first := s.wait(claim())
	if err := s.ForceRelease(s.Context(), s.key); err != nil {
		s.Fatal(err)
	}
	s.wait(claim()) // its question hands the lock over to the first
	_, err := s.Renew(s.Context(), s.key, first)
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
	s.acquire(s.key, holder.Token, long)
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
		_, err := s.Acquire(s.Context(), s.key, last)
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

// listener returns a process that listens, and what it is told.
func (s *suite) listener() (lock.Process, <-chan lock.Token) {
	s.Helper()
	process := lock.NewProcess()
	listening, told := make(chan bool, 10), make(chan lock.Token, 10)
	s.Listen(process, lock.Listener{
		Handed:    func(token lock.Token) { told <- token },
		Listening: func(on bool, err error) { listening <- on },
	})
	if on := <-listening; !on {
		s.Fatal("the Store does not tell of hand-overs")
	}
	return process, told
}

func (s *suite) tellsOfHandOver() {
	process, handed := s.listener()
	holder := claim()
	s.acquire(s.key, holder.Token, long)
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
	s.acquire(s.key, late.Token, shortest)
	s.awaitExpiry(s.key)
	next := claim()
	s.acquire(s.key, next.Token, long)
	s.wait(claim())
	if successor, err := s.Release(s.Context(), s.key, late); err == nil || successor.Token != "" {
		s.Errorf("release of a lock that is another's: %v, %v", successor, err)
	}
	if _, err := s.Renew(s.Context(), s.key, next); err != nil {
		s.Errorf("renew by the holder: %v", err)
	}
}
