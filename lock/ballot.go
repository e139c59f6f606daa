package lock

import (
	"context"
	"sync"
	"time"
)

// A ballot is an attempt to take a lock on the nodes of a quorum, and what came of it. Its token is
// of its own: once one of them has been told to release it, it is never used again, so that a
// release that arrives late can do no harm.
type ballot struct {
	key   string
	of    Token // the claim's
	token Token // its own

	mu    sync.Mutex
	lease time.Duration // the longest that a node was asked for
	over  bool          // whatever a node grants from now on is to be given back
	may   []presence
	since time.Time // when a majority agreed first
	until time.Time // somebody may believe in the lock
}

// presence is whether a node has a ballot's lock.
type presence int

const (
	notThere presence = iota
	surely
	maybe // an attempt went unanswered, and may arrive yet
)

func newBallot(key string, claim Claim, nodes int) *ballot {
	return &ballot{key: key, of: claim.Token, token: claim.Token, may: make([]presence, nodes)}
}

// ballotOf returns the one by which the claim holds its lock, or else a new one.
func (q *quorum) ballotOf(key string, claim Claim) *ballot {
	if b := q.held(claim.Token); b != nil {
		return b
	}
	b := newBallot(key, claim, len(q.nodes))
	b.token = claim.Token.process().NewToken()
	return b
}

func (q *quorum) held(token Token) *ballot {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ballots[token]
}

func (q *quorum) forget(b *ballot) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.ballots, b.of)
}

// claim returns what the nodes are told: none of them has a line.
func (b *ballot) claim(lease time.Duration) Claim {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lease = max(b.lease, lease)
	return Claim{Token: b.token, Lease: lease}
}

// take asks one node for the ballot's lock. Whether the ballot is over may turn out meanwhile.
func (q *quorum) take(op until, b *ballot, lease time.Duration, i int) (Grant, error) {
	grant, err := q.nodes[i].acquire(op, q.few(), b, lease)
	there := notThere
	switch away, failed := err.(*UnavailableError); {
	case err == nil:
		there = surely
	case failed && away.Doubtful:
		there = maybe
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.may[i] = max(b.may[i], there)
	if b.over && there != notThere {
		q.tasks.Go(func() { q.discard(i, b, there) })
	}
	return grant, err
}

// close returns which nodes may have the lock of a ballot that is over now.
func (b *ballot) close() []presence {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
	may := b.may
	b.may = make([]presence, len(may))
	return may
}

func (b *ballot) closed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.over
}

func (b *ballot) longest() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lease
}

// granted notes that a majority agreed.
func (b *ballot) granted(grant Grant) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if b.since.IsZero() {
		b.since = now
	}
	b.until = now.Add(grant.TTL)
}

// believed is true if somebody may still believe in an earlier answer.
func (b *ballot) believed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return time.Now().Before(b.until)
}

// end gives back what the nodes have of a ballot that is over.
func (q *quorum) end(b *ballot) {
	q.forget(b)
	for i, there := range b.close() {
		if there != notThere {
			q.tasks.Go(func() { q.discard(i, b, there) })
		}
	}
}

// discard releases a ballot's lock on one node in the background, as leaveBehind does: until there
// is an answer, or the lock has run out.
func (q *quorum) discard(i int, b *ballot, there presence) {
	n, claim := q.nodes[i], b.claim(0)
	n.leftovers.add(b.key, claim)
	defer n.leftovers.remove(b.key, claim)
	runsOut := time.Now().Add(b.longest() + 2*time.Second)
	for pause := minRelease; time.Now().Before(runsOut); pause = min(2*pause, maxRelease) {
		err := n.release(operationOf(context.Background()), q.few(), b.key, claim)
		if answered(err) {
			if err == nil || there == surely {
				return
			}
			there = surely // the attempt may be slower than its release: look once more
			pause = DefaultOpTimeout
		}
		select {
		case <-time.After(pause):
		case <-q.stop:
			return
		}
	}
}
