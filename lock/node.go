package lock

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// A node is one of the Stores of a quorum.
type node struct {
	store     Store
	outage    outage
	leftovers leftovers
	votesFrom atomic.Pointer[time.Time] // it has restarted; nil: it has not, as far as is known
}

func newNode(config Node) *node {
	if config.OnOutage == nil {
		config.OnOutage = func(error) {}
	}
	if config.OnRecovery == nil {
		config.OnRecovery = func(time.Duration) {}
	}
	return &node{
		store:     config.Store,
		outage:    outage{onOutage: config.OnOutage, onRecovery: config.OnRecovery},
		leftovers: leftovers{byKey: make(map[string][]Claim)},
	}
}

// reach has do ask the node. While that is away, one caller at a time finds out whether it is back, by a
// question that leaves no trace: a node that hangs is not to find all of them when it goes on. The
// others do without the node if few are away, and otherwise wait for what that one finds out.
func (n *node) reach(op until, few bool, key string, do func() error) error {
	if n.outage.away.Load() {
		if err := n.outage.asked(); few && err != nil {
			return err
		}
		done, err := n.outage.admit(op)
		if err != nil {
			return err
		}
		if n.outage.away.Load() {
			err = n.store.Inspect(op, key, "")
			n.outage.report(key, err)
			if away, ok := errors.AsType[*UnavailableError](err); ok {
				done()
				return &UnavailableError{Err: away.Err}
			}
		}
		done()
	}
	err := do()
	n.outage.report(key, err)
	return err
}

// acquire first gives back what is left over of the same key, which would be taken for
// somebody else's.
func (n *node) acquire(op until, few bool, b *ballot, lease time.Duration) (grant Grant, err error) {
	late := false
	err = n.reach(op, few, b.key, func() error {
		for _, claim := range n.leftovers.of(b.key) {
			if _, err := n.store.Release(op, b.key, claim); !answered(err) {
				return &UnavailableError{Err: err}
			}
			n.leftovers.remove(b.key, claim)
		}
		if late = b.closed(); late {
			return nil
		}
		grant, err = n.store.Acquire(op, b.key, b.claim(lease))
		return err
	})
	if late { // it was decided without the node, and nobody wants to know
		return Grant{}, &UnavailableError{Err: context.DeadlineExceeded}
	}
	if held, ok := errors.AsType[*HeldError](err); ok && held.Why == Restarted {
		from := time.Now().Add(held.For)
		n.votesFrom.Store(&from)
	} else if answered(err) {
		n.votesFrom.Store(nil)
	}
	return grant, err
}

func (n *node) renew(op until, few bool, b *ballot, lease time.Duration) (grant Grant, err error) {
	err = n.reach(op, few, b.key, func() error {
		grant, err = n.store.Renew(op, b.key, b.claim(lease))
		return err
	})
	return grant, err
}

func (n *node) release(op until, few bool, key string, claim Claim) error {
	return n.reach(op, few, key, func() error {
		_, err := n.store.Release(op, key, claim)
		return err
	})
}

// inspect knows from earlier answers whether the node votes, which depends on the lease.
func (n *node) inspect(op until, few bool, key string) error {
	err := n.reach(op, few, key, func() error { return n.store.Inspect(op, key, "") })
	if from := n.votesFrom.Load(); answered(err) && from != nil && time.Now().Before(*from) {
		return &HeldError{Why: Restarted, For: time.Until(*from)}
	}
	return err
}

func (n *node) forceRelease(op until, few bool, key string) error {
	return n.reach(op, few, key, func() error { return n.store.ForceRelease(op, key) })
}
