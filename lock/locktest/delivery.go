package locktest

import (
	"errors"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// window is for how long a delivery counts as handled.
const window = time.Hour

// handling returns a claim of a process of its own for a delivery. It waits.
func handling(delivery string) lock.Claim {
	c := claim()
	c.Token = c.Token.Handling(delivery)
	return c
}

// done returns the claim, which has handled its delivery well.
func done(c lock.Claim) lock.Claim {
	c.Done = window
	return c
}

// refused asks for the lock, for a claim that is not to get it.
func (s *suite) refused(c lock.Claim, want error) {
	s.Helper()
	if _, err := s.Acquire(s.Context(), s.key, c); !errors.Is(err, want) {
		s.Errorf("acquire: %v, want %v", err, want)
	}
}

func (s *suite) take(c lock.Claim) {
	s.Helper()
	if _, err := s.Acquire(s.Context(), s.key, c); err != nil {
		s.Fatalf("acquire: %v", err)
	}
}

func (s *suite) handlesOnce() {
	first := handling("72d3162e")
	s.take(first)
	if err := s.give(done(first)); err != nil {
		s.Fatalf("release: %v", err)
	}
	again := handling("72d3162e")
	s.refused(again, lock.ErrDone)
	lineUp := again
	lineUp.LineUp = true
	s.refused(lineUp, lock.ErrDone)
	if err := s.Inspect(s.Context(), s.key, again.Token); !errors.Is(err, lock.ErrDone) {
		s.Errorf("inspect: %v, want %v", err, lock.ErrDone)
	}
	other := handling("72d3162f")
	s.take(other)
	s.refused(again, lock.ErrDone) // whoever has the lock
	if err := s.Inspect(s.Context(), s.key, again.Token); !errors.Is(err, lock.ErrDone) {
		s.Errorf("inspect while another one has the lock: %v, want %v", err, lock.ErrDone)
	}
	s.key += "2"
	s.take(again) // deliveries belong to a key
}

func (s *suite) triesFailedAgain() {
	first := handling("x")
	s.take(first)
	s.give(first)
	again := handling("x")
	s.take(again)
	again.Done = time.Millisecond
	s.give(again)
	s.awaitAcquire(handling("x")) // when the window has passed
}

func (s *suite) awaitAcquire(c lock.Claim) {
	s.Helper()
	for giveUp := time.Now().Add(time.Minute); time.Now().Before(giveUp); time.Sleep(time.Millisecond) {
		if _, err := s.Acquire(s.Context(), s.key, c); err == nil {
			return
		}
	}
	s.Fatal("the lock is not to be had")
}

func (s *suite) tellsSameDelivery() {
	holder := handling("x")
	s.take(holder)
	same, other := handling("x"), handling("y")
	same.Wait, other.Wait = false, false
	for _, c := range []struct {
		claim lock.Claim
		want  lock.Reason
	}{{same, lock.SameDelivery}, {other, lock.Held}, {lock.Claim{Token: newToken(), Lease: long}, lock.Held}} {
		_, acquire := s.Acquire(s.Context(), s.key, c.claim)
		for _, err := range []error{acquire, s.Inspect(s.Context(), s.key, c.claim.Token)} {
			if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Why != c.want {
				s.Errorf("%v, want held (%s)", err, c.want)
			}
		}
	}
	s.take(holder) // its own question, sent again
	if held, ok := errors.AsType[*lock.HeldError](s.Inspect(s.Context(), s.key, holder.Token)); !ok || held.Why != lock.Held {
		s.Errorf("inspect by the holder itself: %v, want held (%s)", held, lock.Held)
	}
	s.give(holder)
	s.take(lock.Claim{Token: newToken(), Lease: long})
	_, err := s.Acquire(s.Context(), s.key, same)
	if held, ok := errors.AsType[*lock.HeldError](err); !ok || held.Why != lock.Held {
		s.Errorf("after the delivery's end: %v, want held (%s)", err, lock.Held)
	}
}

// The same delivery waits while it is handled: it gets the lock if that failed, and otherwise
// hears that there is nothing to do.
func (s *suite) decidesInLine() {
	for _, well := range []bool{false, true} {
		holder := handling("x")
		s.take(holder)
		again := s.wait(handling("x"))
		next := s.wait(handling("y"))
		if well {
			s.handOver(done(holder), again)
			s.refused(again, lock.ErrDone)
			s.handOver(again, next)
		} else {
			s.handOver(holder, again)
			s.confirm(again)
			s.handOver(again, next)
		}
		s.confirm(next)
		s.give(next)
	}
}

// What was handled well is that also if the lock was lost meanwhile.
func (s *suite) notesDoneWithoutLock() {
	late := handling("x")
	late.Lease = shortest
	s.take(late)
	s.awaitExpiry(s.key)
	s.take(handling("y"))
	s.lost(s.give(done(late)), lock.NotOwner)
	s.refused(handling("x"), lock.ErrDone)
	if err := s.Inspect(s.Context(), s.key, ""); !errors.Is(err, lock.ErrHeld) {
		s.Errorf("inspect: %v, want held by the next one", err)
	}
}

// superseding returns a claim of a process of its own that takes the place of others of its kind.
func superseding() lock.Claim {
	c := claim()
	c.Token = c.Token.Superseding()
	return c
}

func (s *suite) newestWins() {
	holder := superseding()
	s.take(holder)
	first := s.wait(superseding())
	ordinary := s.wait(claim())
	second := s.wait(superseding())
	s.refused(first, lock.ErrSuperseded)
	s.stillWaits(ordinary)
	s.stillWaits(second)
	s.lost(s.give(first), lock.NotOwner)
	s.handOver(holder, ordinary)
	s.confirm(ordinary)
	third := s.wait(superseding())
	s.refused(second, lock.ErrSuperseded)
	s.refused(first, lock.ErrSuperseded)
	s.handOver(ordinary, third)
	s.wait(superseding()) // no more than one that runs
	s.confirm(third)
}

// A place that the Store has lost is taken again, but not from a newer one.
func (s *suite) newestKeepsPlace() {
	holder := superseding()
	s.take(holder)
	first := s.wait(superseding())
	s.lost(s.give(first), lock.NotOwner) // stands for a Store that lost it
	s.wait(first)
	second := s.wait(superseding())
	s.lost(s.give(second), lock.NotOwner)
	s.refused(first, lock.ErrSuperseded)
	s.wait(second)
	s.handOver(holder, second)
}

// What is sent again while it is handled is older than what waits.
func (s *suite) redeliveryDisplacesNobody() {
	newDeploy := func(delivery string) lock.Claim {
		c := superseding()
		c.Token = claim().Token.Handling(delivery).Superseding()
		return c
	}
	holder := newDeploy("x")
	s.take(holder)
	again := s.wait(newDeploy("x"))
	newer := s.wait(newDeploy("y"))
	s.refused(again, lock.ErrSuperseded)
	s.refused(newDeploy("x"), lock.ErrSuperseded)
	s.stillWaits(newer)
	s.handOver(done(holder), newer)
	s.confirm(newer)
}

func (s *suite) tellsSuperseded() {
	holder := superseding()
	s.take(holder)
	process, told := s.listener()
	displaced := superseding()
	displaced.Token = process.NewToken().Superseding()
	displaced = s.wait(displaced)
	s.wait(superseding())
	if token := <-told; token != displaced.Token {
		s.Errorf("told of %v, want %v", token, displaced.Token)
	}
}
