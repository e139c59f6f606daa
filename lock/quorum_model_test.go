package lock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// These tests have a few processes compete for one lock over three nodes, for hours of a clock that
// is not real, while requests and answers are slow, late or lost, and one node at a time crashes
// and comes back empty, hangs, or is cut off. Each node's locks last for their lease exactly, with nothing to
// spare. The rules of the algorithm are left out one by one: each time two processes must be
// found to hold the lock at once.

const (
	simNodes     = 3
	simProcesses = 4
	simLease     = 2 * time.Second
	simTime      = 20 * time.Minute
)

// simRules are those that may be left out.
type simRules struct {
	noMarker   bool // a node that came back empty votes at once
	noMajority bool // one node is enough
	fromAnswer bool // the lease counts from the answer
	manyFaults bool // of all nodes, and all the time: none of the algorithm's, but of the world's
}

// A simNode is a server: all processes see the same one.
type simNode struct {
	rules simRules

	mu    sync.Mutex
	store Store         // nil: it has crashed
	since time.Time     // of its memory
	up    chan struct{} // closed while it runs
	down  bool          // connections are refused
	slow  time.Duration // a request, or its answer, may take as long
	lost  int           // percent of the requests, and of the answers
	tasks *sync.WaitGroup
}

// request carries one out, sometime, whether its sender still waits for it or not.
func (n *simNode) request(ctx context.Context, do func(Store, time.Duration) (Grant, error)) (Grant, error) {
	n.mu.Lock()
	there, back := n.delay(), n.delay()
	loseIt, loseAnswer := rand.N(100) < n.lost, rand.N(100) < n.lost
	down := n.down
	n.mu.Unlock()
	if down {
		return Grant{}, &UnavailableError{Err: errors.New("connection refused")}
	}
	answer := make(chan vote, 1)
	n.tasks.Go(func() {
		time.Sleep(there)
		n.mu.Lock()
		up, store := n.up, n.store
		n.mu.Unlock()
		<-up
		if loseIt {
			return
		}
		n.mu.Lock()
		if n.store != store || store == nil {
			n.mu.Unlock()
			return // it crashed meanwhile
		}
		grant, err := do(n.store, time.Since(n.since))
		n.mu.Unlock()
		time.Sleep(back)
		if !loseAnswer {
			answer <- vote{grant: grant, err: err}
		}
	})
	deadline, _ := ctx.Deadline()
	select {
	case v := <-answer:
		return v.grant, v.err
	case <-time.After(time.Until(deadline)):
		return Grant{}, &UnavailableError{Doubtful: true, Err: context.DeadlineExceeded}
	}
}

func (n *simNode) delay() time.Duration {
	if rand.N(10) == 0 {
		return rand.N(n.slow)
	}
	return rand.N(time.Millisecond)
}

func (n *simNode) young(age, lease time.Duration) bool {
	return !n.rules.noMarker && age < lease+2*time.Second
}

func (n *simNode) Acquire(ctx context.Context, key string, claim Claim) (Grant, error) {
	return n.request(ctx, func(s Store, age time.Duration) (Grant, error) {
		if n.young(age, claim.Lease) {
			return Grant{}, &HeldError{Why: Restarted, For: claim.Lease + 2*time.Second - age}
		}
		return s.Acquire(ctx, key, claim)
	})
}

func (n *simNode) Renew(ctx context.Context, key string, claim Claim) (Grant, error) {
	return n.request(ctx, func(s Store, age time.Duration) (Grant, error) {
		if n.young(age, claim.Lease) {
			return Grant{}, &LostError{Why: Restarted}
		}
		return s.Renew(ctx, key, claim)
	})
}

func (n *simNode) Release(ctx context.Context, key string, claim Claim) (Successor, error) {
	_, err := n.request(ctx, func(s Store, _ time.Duration) (Grant, error) {
		_, err := s.Release(ctx, key, claim)
		return Grant{}, err
	})
	return Successor{}, err
}

func (n *simNode) Inspect(ctx context.Context, key string, token Token) error {
	_, err := n.request(ctx, func(s Store, _ time.Duration) (Grant, error) { return Grant{}, s.Inspect(ctx, key, token) })
	return err
}

func (n *simNode) ForceRelease(ctx context.Context, key string) error {
	_, err := n.request(ctx, func(s Store, _ time.Duration) (Grant, error) { return Grant{}, s.ForceRelease(ctx, key) })
	return err
}

func (n *simNode) Shard(string) string      { return "" }
func (n *simNode) Listen(Process, Listener) {}
func (n *simNode) Close() error             { return nil }

// fault has something happen to the node, and mends it.
func (n *simNode) fault() {
	set := func(change func()) {
		n.mu.Lock()
		defer n.mu.Unlock()
		change()
	}
	lasts := rand.N(3 * simLease)
	switch rand.N(4) {
	case 0: // crashes
		set(func() { n.down, n.store = true, nil })
		time.Sleep(lasts)
		set(func() { n.down, n.store, n.since = false, NewMemory(), time.Now() })
	case 1: // is flushed
		set(func() { n.store, n.since = NewMemory(), time.Now() })
	case 2: // hangs
		up := make(chan struct{})
		set(func() { n.up = up })
		time.Sleep(lasts)
		close(up)
	case 3: // cannot be reached
		set(func() { n.down = true })
		time.Sleep(lasts)
		set(func() { n.down = false })
	}
}

// A believer takes the lock for its own.
type believer struct {
	ctx   context.Context
	until time.Time // if it counts from the answer
}

func (b *believer) believes() bool { return b.ctx.Err() == nil || time.Now().Before(b.until) }

// simulate returns how often the lock was taken, and how often two held it at once.
func simulate(t *testing.T, rules simRules, lasts time.Duration) (taken, overlaps int) {
	synctest.Test(t, func(t *testing.T) {
		var requests sync.WaitGroup
		defer requests.Wait()
		nodes := make([]*simNode, simNodes)
		for i := range nodes {
			nodes[i] = &simNode{rules: rules, store: NewMemory(), up: make(chan struct{}), slow: simLease, lost: 3, tasks: &requests}
			close(nodes[i].up)
		}
		end := time.Now().Add(lasts)
		var mu sync.Mutex
		var believers []*believer
		var processes sync.WaitGroup
		for range simProcesses {
			var stores []Node
			for _, n := range nodes {
				stores = append(stores, Node{Store: n})
			}
			q := NewQuorum(stores...).(*quorum)
			if rules.noMajority {
				q.need = 1
			}
			l := New(q, Options{OpTimeout: simLease})
			for range 2 {
				processes.Go(func() {
					for time.Now().Before(end) {
						h, err := l.Acquire(t.Context(), "name", Lease(simLease), Wait(rand.N(20*time.Second)))
						if err != nil {
							time.Sleep(rand.N(time.Second))
							continue
						}
						mu.Lock()
						taken++
						us := &believer{ctx: h.Context()}
						if rules.fromAnswer {
							us.until = time.Now().Add(simLease - simLease/clockDrift - margin)
						}
						believers = slices.DeleteFunc(believers, func(b *believer) bool { return !b.believes() })
						if us.believes() {
							overlaps += len(believers)
							believers = append(believers, us)
						}
						mu.Unlock()
						if rand.N(2) == 0 {
							h.StopRenewing()
						}
						select {
						case <-time.After(rand.N(3 * simLease)):
						case <-h.Context().Done():
							time.Sleep(time.Until(us.until))
						}
						mu.Lock()
						us.until = time.Time{}
						mu.Unlock()
						_ = h.Release(context.WithoutCancel(t.Context()))
					}
				})
			}
			defer func() { _ = l.Close(context.Background()) }()
		}
		for i := 0; rules.manyFaults && i < len(nodes); i++ {
			processes.Go(func() {
				for time.Now().Before(end) {
					time.Sleep(rand.N(4 * simLease))
					nodes[i].fault()
				}
			})
		}
		for time.Now().Before(end) {
			time.Sleep(2*simLease + 4*time.Second + rand.N(simLease))
			nodes[rand.N(len(nodes))].fault()
		}
		processes.Wait()
	})
	return taken, overlaps
}

func TestQuorumSimulation(t *testing.T) {
	t.Parallel()
	taken, overlaps := simulate(t, simRules{}, simTime)
	t.Logf("taken %d times", taken)
	if overlaps > 0 {
		t.Errorf("two held it at once %d times", overlaps)
	}
	if taken < 150 {
		t.Errorf("taken only %d times", taken)
	}
}

// However many fail at once: fewer get the lock, and no two at once.
func TestQuorumSimulationOfManyFaults(t *testing.T) {
	t.Parallel()
	taken, overlaps := simulate(t, simRules{manyFaults: true}, simTime)
	t.Logf("taken %d times", taken)
	if overlaps > 0 || taken == 0 {
		t.Errorf("taken %d times, and two held it at once %d times", taken, overlaps)
	}
}

func TestQuorumSimulationFindsMistakes(t *testing.T) {
	t.Parallel()
	for _, rules := range []simRules{{noMarker: true}, {noMajority: true}, {fromAnswer: true}} {
		t.Run(fmt.Sprintf("%+v", rules), func(t *testing.T) {
			total := 0
			for range 50 {
				taken, overlaps := simulate(t, rules, simTime)
				total += taken
				if overlaps > 0 {
					t.Logf("found: %d of %d", overlaps, total)
					return
				}
			}
			t.Errorf("two never held it at once, taken %d times", total)
		})
	}
}
