package lock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// quorum is a Store over independent ones, see NewQuorum.
type quorum struct {
	nodes []*node
	need  int          // a majority
	place atomic.Int64 // the last one given out, of any key
	gates gates

	mu      sync.Mutex
	ballots map[Token]*ballot // of the claims that hold a lock
	yields  map[string]time.Time

	tasks    sync.WaitGroup
	stop     chan struct{} // closed by Close
	stopOnce sync.Once
}

// A Node is one of the Stores of a quorum.
type Node struct {
	Store

	// OnOutage and OnRecovery, if set, are called when the node becomes unavailable and when it
	// answers again, as those of [Options]: one may be away without anybody noticing.
	OnOutage   func(error)
	OnRecovery func(away time.Duration)
}

// NewQuorum returns a Store that keeps each lock on a majority of nodes, which know nothing of one
// another: the Redlock algorithm of Redis's documentation. Give it three or five Redis servers without
// replicas, each as a [NewGetSetNode]. As long as a majority answers, it makes no difference that others are
// down, hang or come back empty, one within a lease. See docs/protocol.md.
//
// All callers of all processes should use one lease: a node that came back waits for as long as the lease
// of the claim that asks it.
//
// Claims that handle a delivery or supersede others are treated as any others. Grants have no fence, as no node counts all of them. There is no line across processes, and nobody
// is told of a lock's end: the first who waits in each process asks. Close waits for what is under
// way in the background, an operation's time at most, and closes the nodes.
func NewQuorum(nodes ...Node) Store {
	q := &quorum{need: len(nodes)/2 + 1, gates: gates{byKey: make(map[string]*gate)},
		ballots: make(map[Token]*ballot), yields: make(map[string]time.Time), stop: make(chan struct{})}
	for _, config := range nodes {
		n := newNode(config)
		q.nodes = append(q.nodes, n)
		if store, ok := n.store.(marked); ok {
			q.tasks.Go(func() { q.keepMarked(store) })
		}
	}
	return q
}

// marked is a Store that notes when it was seen first, see marker.lua.
type marked interface {
	mark(ctx context.Context) error
}

// remark is how often a node is marked: one that came up is to have waited by the time somebody asks it.
const remark = 10 * time.Second

func (q *quorum) keepMarked(store marked) {
	for pause := minRelease; ; {
		if err := store.mark(operationOf(context.Background())); err == nil {
			pause = remark
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, remark)
		case <-q.stop:
			return
		}
	}
}

func (q *quorum) Acquire(ctx context.Context, key string, claim Claim) (Grant, error) {
	var grant Grant
	var err error
	if claim.LineUp {
		if err = q.Inspect(ctx, key, claim.Token); err == nil {
			err = &HeldError{Why: Free}
		}
	} else if claim.Wait && q.yielding(key) {
		err = &HeldError{Why: Held}
	} else {
		grant, err = q.elect(ctx, key, claim)
	}
	if held, ok := errors.AsType[*HeldError](err); ok && (claim.Wait || claim.LineUp) {
		held.Place = claim.Place
		if held.NewPlace = claim.Place == 0; held.NewPlace {
			held.Place = q.place.Add(1)
		}
	}
	return grant, err
}

// elect asks all nodes at once. If no majority agrees, it gives back in the background what it got: to
// wait for that would make the caller no wiser, and whoever it is in the way of pauses, too, before asking
// again. Callers of one process do not compete, or all of them might fail.
func (q *quorum) elect(ctx context.Context, key string, claim Claim) (Grant, error) {
	op := operationOf(ctx)
	if !q.gates.enter(op, key) {
		return Grant{}, &UnavailableError{Err: context.DeadlineExceeded}
	}
	defer q.gates.leave(key)
	b := q.ballotOf(key, claim)
	t := q.count(ctx, q.ask(func(i int) (Grant, error) { return q.take(op, b, claim.Lease, i) }), (*tally).elected)
	if !t.agrees() {
		if !b.believed() {
			q.end(b)
		}
		return Grant{}, t.refusal(claim.Lease)
	}
	b.granted(t.grant())
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ballots[claim.Token] = b
	return t.grant(), nil
}

// Renew has nodes that lack the lock take it in the same round: they were down when it was taken, or
// have restarted since.
func (q *quorum) Renew(ctx context.Context, key string, claim Claim) (Grant, error) {
	r := &renewal{quorum: q, ballot: q.held(claim.Token), op: operationOf(ctx), lease: claim.Lease, answered: make(chan struct{})}
	if r.ballot == nil {
		r.foreign = true
		r.ballot = newBallot(key, claim, len(q.nodes))
	}
	q.tasks.Go(r.run)
	select {
	case <-r.answered:
		return r.grant, r.err
	case <-ctx.Done():
		return Grant{}, &UnavailableError{Doubtful: true, Err: ctx.Err()}
	}
}

func (q *quorum) Release(ctx context.Context, key string, claim Claim) (Successor, error) {
	b := q.held(claim.Token)
	foreign := b == nil
	if foreign {
		b = newBallot(key, claim, len(q.nodes))
	}
	q.forget(b)
	may := b.close()
	op := operationOf(ctx)
	var having sync.WaitGroup // nodes that have it
	for _, there := range may {
		if there != notThere {
			having.Add(1)
		}
	}
	free := make(chan struct{})
	q.tasks.Go(func() {
		having.Wait()
		close(free)
	})
	t := q.count(ctx, q.ask(func(i int) (Grant, error) {
		err := q.nodes[i].release(op, q.few(), b.key, b.claim(claim.Lease))
		if may[i] != notThere {
			having.Done()
		} else {
			// It may have no vote the next time: if the others are not free by then, nobody gets it.
			select {
			case <-free:
			case <-time.After(maxPoll):
			}
		}
		if may[i] != notThere && !(answered(err) && (err == nil || may[i] == surely)) {
			q.tasks.Go(func() { q.discard(i, b, may[i]) })
		}
		if errors.Is(err, ErrLost) && may[i] == notThere && !foreign {
			err = nil // this one never had it
		}
		return Grant{}, err
	}), (*tally).released)
	if t.agrees() {
		q.yield(b)
	}
	return Successor{}, t.outcome(claim.Lease)
}

func (q *quorum) Inspect(ctx context.Context, key string, _ Token) error {
	op := operationOf(ctx)
	t := q.count(ctx, q.ask(func(i int) (Grant, error) {
		return Grant{}, q.nodes[i].inspect(op, q.few(), key)
	}), (*tally).elected)
	if t.agrees() {
		return nil
	}
	return t.refusal(0)
}

func (q *quorum) ForceRelease(ctx context.Context, key string) error {
	op := operationOf(ctx)
	t := q.count(ctx, q.ask(func(i int) (Grant, error) {
		return Grant{}, q.nodes[i].forceRelease(op, q.few(), key)
	}), (*tally).released)
	return t.outcome(0)
}

func (q *quorum) Shard(string) string { return "" }

// Listen has nothing to tell: callers ask.
func (q *quorum) Listen(Process, Listener) {}

func (q *quorum) Close() error {
	q.stopOnce.Do(func() { close(q.stop) })
	q.tasks.Wait()
	var errs []error
	for _, n := range q.nodes {
		errs = append(errs, n.store.Close())
	}
	return errors.Join(errs...)
}

// A vote is a node's answer, or its error.
type vote struct {
	node  int
	grant Grant
	err   error
}

// ask has all nodes asked at once. Whoever does not wait for all of them leaves them to their
// deadline.
func (q *quorum) ask(do func(i int) (Grant, error)) <-chan vote {
	votes := make(chan vote, len(q.nodes))
	for i := range q.nodes {
		q.tasks.Go(func() {
			grant, err := do(i)
			votes <- vote{i, grant, err}
		})
	}
	return votes
}

// count waits until it is decided what the votes come to.
func (q *quorum) count(ctx context.Context, votes <-chan vote, decided func(*tally) bool) *tally {
	t := &tally{nodes: len(q.nodes), need: q.need}
	var patience <-chan time.Time
	for !decided(t) {
		if t.split() && patience == nil {
			patience = time.After(maxPoll)
		}
		select {
		case v := <-votes:
			t.add(v.grant, v.err)
		case <-patience:
			return t
		case <-ctx.Done():
			t.add(Grant{}, &UnavailableError{Doubtful: true, Err: ctx.Err()})
			return t
		}
	}
	return t
}

// few is true if so few nodes are away that the others can do without them.
func (q *quorum) few() bool {
	away := 0
	for _, n := range q.nodes {
		if n.outage.away.Load() {
			away++
		}
	}
	return away <= len(q.nodes)-q.need
}

// operationOf returns a context with the deadline of ctx that does not end before it: what a node
// answers must be known, whether somebody waits for it or not.
func operationOf(ctx context.Context) until {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(DefaultOpTimeout)
	}
	return until{context.WithoutCancel(ctx), deadline}
}
