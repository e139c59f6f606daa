package lock

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// A tally counts what the nodes of a quorum answered. A node that has restarted has not voted, and
// one that is away has not either; a refusal is a vote.
type tally struct {
	nodes, need int

	grants   []Grant // yes
	held     []*HeldError
	lost     []*LostError
	young    int
	away     []error
	doubtful bool
}

func (t *tally) add(grant Grant, err error) {
	switch err := err.(type) {
	case nil:
		t.grants = append(t.grants, grant)
	case *HeldError:
		if err.Why == Restarted {
			t.young++
		} else {
			t.held = append(t.held, err)
		}
	case *LostError:
		if err.Why == Restarted {
			t.young++
		} else {
			t.lost = append(t.lost, err)
		}
	case *UnavailableError:
		t.away = append(t.away, err.Err)
		t.doubtful = t.doubtful || err.Doubtful
	default:
		t.away = append(t.away, err)
	}
}

// missing is how many answers are still to come.
func (t *tally) missing() int {
	return t.nodes - len(t.grants) - len(t.held) - len(t.lost) - t.young - len(t.away)
}

func (t *tally) agrees() bool { return len(t.grants) >= t.need }

// split is true if a majority has voted, and does not agree.
func (t *tally) split() bool { return !t.agrees() && len(t.grants)+len(t.held) >= t.need }

// elected is true if it is decided what an attempt to take a lock comes to.
func (t *tally) elected() bool {
	missing := t.missing()
	switch {
	case t.agrees() || missing == 0:
		return true
	case len(t.grants)+missing >= t.need:
		return false
	}
	return t.split() || len(t.grants)+len(t.held)+missing < t.need
}

// released is true if it is decided what a release comes to.
func (t *tally) released() bool {
	missing := t.missing()
	most := max(len(t.grants), len(t.lost))
	return most >= t.need || most+missing < t.need
}

// grant is what a majority agreed to: it lasts until the first of them may change its mind. As
// counting ends with the vote that makes a majority, there is no other to choose from.
func (t *tally) grant() Grant {
	shortest := slices.MinFunc(t.grants, func(a, b Grant) int { return cmp.Compare(a.TTL, b.TTL) })
	return Grant{TTL: shortest.TTL}
}

// refusal is what an attempt to take a lock comes to that no majority agreed to: contention if a majority
// voted. It may be over as soon as enough of those who refused change their minds.
func (t *tally) refusal(lease time.Duration) error {
	if !t.split() {
		return t.unavailable(lease)
	}
	slices.SortFunc(t.held, func(a, b *HeldError) int { return cmp.Compare(a.wait(), b.wait()) })
	decisive := t.held[t.need-len(t.grants)-1]
	return &HeldError{Why: decisive.Why, For: decisive.For}
}

// wait is For, but that which is not known is the longest.
func (e *HeldError) wait() time.Duration {
	if e.For == 0 {
		return 1<<63 - 1
	}
	return e.For
}

// outcome is what a release or a renewal comes to.
func (t *tally) outcome(lease time.Duration) error {
	switch {
	case t.agrees():
		return nil
	case len(t.lost) >= t.need:
		return t.lostTo()
	}
	return t.unavailable(lease)
}

// lostTo says that somebody else has the lock if any node says so: the others may not have heard.
func (t *tally) lostTo() *LostError {
	for _, lost := range t.lost {
		if lost.Why == NotOwner {
			return lost
		}
	}
	return t.lost[0]
}

func (t *tally) unavailable(lease time.Duration) error {
	return &UnavailableError{Doubtful: t.doubtful, Err: &noQuorumError{tally: *t, lease: lease}}
}

// noQuorumError says why not enough nodes voted.
type noQuorumError struct {
	tally
	lease time.Duration // zero: not known
}

func (e *noQuorumError) Error() string {
	var reasons []string
	if n := len(e.away); n > 0 {
		var causes []string
		for _, err := range e.away {
			if !slices.Contains(causes, err.Error()) {
				causes = append(causes, err.Error())
			}
		}
		reasons = append(reasons, fmt.Sprintf("%d of %d nodes did not answer: %s", n, e.nodes, strings.Join(causes, "; ")))
	}
	if e.young > 0 {
		since := "a lease and 2s"
		if e.lease > 0 {
			since = (e.lease + 2*time.Second).String()
		}
		reasons = append(reasons, fmt.Sprintf("%d of %d nodes came up empty less than %s ago and have no vote until then, which passes by itself",
			e.young, e.nodes, since))
	}
	return strings.Join(reasons, "; ")
}

// Unwrap returns the nodes' errors.
func (e *noQuorumError) Unwrap() []error { return e.away }
