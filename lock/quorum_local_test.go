package lock

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// switched is a node that can hang, inside this process.
type switched struct {
	Store
	hangs atomic.Bool
}

func (s *switched) ask(ctx context.Context, do func() error) error {
	deadline, ok := ctx.Deadline()
	if !s.hangs.Load() && (!ok || time.Now().Before(deadline)) {
		return do()
	}
	time.Sleep(time.Until(deadline))
	return &UnavailableError{Doubtful: true, Err: context.DeadlineExceeded}
}

func (s *switched) Acquire(ctx context.Context, key string, claim Claim) (grant Grant, err error) {
	err = s.ask(ctx, func() error {
		grant, err = s.Store.Acquire(ctx, key, claim)
		return err
	})
	return grant, err
}

func (s *switched) Renew(ctx context.Context, key string, claim Claim) (grant Grant, err error) {
	err = s.ask(ctx, func() error {
		grant, err = s.Store.Renew(ctx, key, claim)
		return err
	})
	return grant, err
}

func (s *switched) Release(ctx context.Context, key string, claim Claim) (Successor, error) {
	return Successor{}, s.ask(ctx, func() error {
		_, err := s.Store.Release(ctx, key, claim)
		return err
	})
}

func (s *switched) Inspect(ctx context.Context, key string, token Token) error {
	return s.ask(ctx, func() error { return s.Store.Inspect(ctx, key, token) })
}

func newSwitched(t *testing.T) ([]*switched, Store) {
	var nodes []*switched
	var stores []Node
	for range 3 {
		nodes = append(nodes, &switched{Store: NewMemory()})
		stores = append(stores, Node{Store: nodes[len(nodes)-1]})
	}
	q := NewQuorum(stores...)
	t.Cleanup(func() { q.Close() })
	return nodes, q
}

func timeOf(do func()) time.Duration {
	begin := time.Now()
	do()
	return time.Since(begin)
}

// A node that hangs delays no answer, but that to a vote which it might have decided; and that not
// for long.
func TestQuorumDoesNotWaitForNodeThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, q := newSwitched(t)
		nodes[2].hangs.Store(true)
		claim := Claim{Token: NewProcess().NewToken(), Lease: time.Minute}
		took := timeOf(func() {
			if _, err := q.Acquire(t.Context(), "key", claim); err != nil {
				t.Error(err)
			}
			if _, err := q.Acquire(t.Context(), "key", Claim{Token: NewProcess().NewToken(), Lease: time.Minute}); !errors.Is(err, ErrHeld) {
				t.Errorf("acquire by another: %v, want held", err)
			}
			if _, err := q.Renew(t.Context(), "key", claim); err != nil {
				t.Error(err)
			}
			if _, err := q.Release(t.Context(), "key", claim); err != nil {
				t.Error(err)
			}
		})
		if took != 0 {
			t.Errorf("took %v", took)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		nodes, q := newSwitched(t)
		nodes[2].hangs.Store(true)
		other := Claim{Token: NewProcess().NewToken(), Lease: time.Minute}
		if _, err := nodes[1].Acquire(t.Context(), "key", other); err != nil {
			t.Fatal(err)
		}
		took := timeOf(func() {
			if _, err := q.Acquire(t.Context(), "key", Claim{Token: NewProcess().NewToken(), Lease: time.Minute}); !errors.Is(err, ErrHeld) {
				t.Errorf("acquire: %v, want held", err)
			}
		})
		if took > maxPoll {
			t.Errorf("a vote that was split took %v", took)
		}
	})
}

// Asked again by a holder that has its lock yet, a quorum that cannot say so takes nothing back.
func TestQuorumRepeatedAcquireTakesNothingBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, q := newSwitched(t)
		claim := Claim{Token: NewProcess().NewToken(), Lease: time.Minute}
		if _, err := q.Acquire(t.Context(), "key", claim); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // the third has it, too
		nodes[1].hangs.Store(true)
		nodes[2].hangs.Store(true)
		if _, err := q.Acquire(t.Context(), "key", claim); !errors.Is(err, ErrUnavailable) {
			t.Fatalf("acquire again: %v, want unavailable", err)
		}
		synctest.Wait()
		for i, node := range nodes {
			if err := node.Store.Inspect(t.Context(), "key", ""); !errors.Is(err, ErrHeld) {
				t.Errorf("node %d: %v, want held", i, err)
			}
		}
		nodes[1].hangs.Store(false)
		nodes[2].hangs.Store(false)
		if _, err := q.Release(t.Context(), "key", claim); err != nil {
			t.Errorf("release: %v", err)
		}
	})
}

// A lock is sure until the first of those who agreed may change its mind.
func TestQuorumGrantsTheShortest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, q := newSwitched(t)
		claim := Claim{Token: NewProcess().NewToken(), Lease: time.Minute}
		if _, err := q.Acquire(t.Context(), "key", claim); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		time.Sleep(10 * time.Second)
		nodes[2].hangs.Store(true)
		if err := nodes[0].ForceRelease(t.Context(), "key"); err != nil {
			t.Fatal(err)
		}
		// Of the two that agree, one has it anew, and one for 10 seconds already.
		if grant, err := q.Acquire(t.Context(), "key", claim); err != nil || grant.TTL != 50*time.Second {
			t.Errorf("granted for %v, %v; want 50s", grant.TTL, err)
		}
	})
}

// A renewal goes on while one node hangs and another lacks the lock.
func TestQuorumRenewalHeals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, q := newSwitched(t)
		nodes[2].hangs.Store(true)
		claim := Claim{Token: NewProcess().NewToken(), Lease: time.Minute}
		if _, err := q.Acquire(t.Context(), "key", claim); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		nodes[1].hangs.Store(true)
		nodes[2].hangs.Store(false)
		if grant, err := q.Renew(t.Context(), "key", claim); err != nil || grant.TTL < time.Minute-DefaultOpTimeout {
			t.Errorf("renew: %+v, %v", grant, err)
		}
		if _, err := q.Release(t.Context(), "key", claim); err != nil {
			t.Errorf("release: %v", err)
		}
	})
}

// Whoever has no lock gets none by renewing it.
func TestQuorumRenewalOfNoLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, q := newSwitched(t)
		nodes[1].hangs.Store(true)
		nodes[2].hangs.Store(true)
		claim := Claim{Token: NewProcess().NewToken(), Lease: time.Minute}
		if _, err := q.Renew(t.Context(), "key", claim); !errors.Is(err, ErrUnavailable) {
			t.Errorf("renew: %v, want unavailable", err)
		}
		synctest.Wait()
		if err := nodes[0].Inspect(t.Context(), "key", ""); err != nil {
			t.Errorf("a node after that: %v, want it free", err)
		}
	})
}

// A node that does not hear of a release hears of it later.
func TestQuorumReleaseIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, q := newSwitched(t)
		claim := Claim{Token: NewProcess().NewToken(), Lease: time.Hour}
		if _, err := q.Acquire(t.Context(), "key", claim); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		nodes[1].hangs.Store(true)
		if _, err := q.Release(t.Context(), "key", claim); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		nodes[1].hangs.Store(false)
		time.Sleep(DefaultOpTimeout + maxRelease)
		if err := nodes[1].Inspect(t.Context(), "key", ""); err != nil {
			t.Errorf("the node that hung: %v, want it free", err)
		}
	})
}

// Those that have not heard of the new holder yet do not hide it.
func TestQuorumLostToAnother(t *testing.T) {
	ty := &tally{nodes: 3, need: 2}
	ty.add(Grant{}, &LostError{Why: Expired})
	ty.add(Grant{}, &LostError{Why: NotOwner})
	if lost, ok := errors.AsType[*LostError](ty.outcome(0)); !ok || lost.Why != NotOwner {
		t.Errorf("outcome %v, want lost (not-owner)", lost)
	}
}

// A refusal is a vote; a node that has restarted has none, as one that is away.
func TestQuorumTally(t *testing.T) {
	yes := func(ttl time.Duration) vote { return vote{grant: Grant{TTL: ttl}} }
	no := func(err error) vote { return vote{err: err} }
	held, lost := no(&HeldError{Why: Held, For: time.Second}), no(&LostError{Why: Expired})
	young, away := no(&HeldError{Why: Restarted}), no(&UnavailableError{Err: context.DeadlineExceeded})
	youngLost := no(&LostError{Why: Restarted})
	for _, c := range []struct {
		name            string
		votes           []vote
		elected, passed error // nil: yes
	}{
		{"all", []vote{yes(1), yes(1), yes(1)}, nil, nil},
		{"one away", []vote{yes(1), away, yes(1)}, nil, nil},
		{"two away", []vote{yes(1), away, away}, ErrUnavailable, ErrUnavailable},
		{"two young", []vote{yes(1), young, young}, ErrUnavailable, ErrUnavailable},
		{"one young, one away", []vote{held, young, away}, ErrUnavailable, ErrUnavailable},
		{"split", []vote{yes(1), held, away}, ErrHeld, ErrUnavailable},
		{"held", []vote{held, held, away}, ErrHeld, ErrUnavailable},
		{"lost", []vote{lost, lost, away}, ErrUnavailable, ErrLost},
		{"lost, and young", []vote{lost, youngLost, away}, ErrUnavailable, ErrUnavailable},
	} {
		t.Run(c.name, func(t *testing.T) {
			ty := &tally{nodes: 3, need: 2}
			for _, v := range c.votes {
				ty.add(v.grant, v.err)
			}
			if !ty.elected() || !ty.released() {
				t.Error("all have answered, and it is not decided")
			}
			if err := ty.outcome(0); !errors.Is(err, c.passed) {
				t.Errorf("outcome %v, want %v", err, c.passed)
			}
			var err error
			if !ty.agrees() {
				err = ty.refusal(0)
			}
			if !errors.Is(err, c.elected) {
				t.Errorf("election %v, want %v", err, c.elected)
			}
		})
	}
}
