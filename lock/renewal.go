package lock

import "time"

// A renewal is one round of a quorum's Renew. It goes on after its answer, until the nodes that lack
// the lock have taken it or refused.
type renewal struct {
	*quorum
	ballot  *ballot
	foreign bool // no ballot of ours: there is nothing to take
	op      until
	lease   time.Duration

	answered chan struct{} // closed when grant and err are there
	grant    Grant
	err      error
}

// run renews on all nodes, for which there is half of the time, so that a node that hangs leaves the
// other half to those that lack the lock.
//
// These are not asked to take it before it is sure that no majority will say that the lock is not
// ours: it may have been released by force, which the holder must learn. From then on what they grant counts
// like a renewal: they refuse others as those do. That the holder's belief is still alive, and so nobody
// else's, is for the holder to see to.
func (r *renewal) run() {
	t := &tally{nodes: len(r.nodes), need: r.need}
	half := until{r.op, time.Now().Add(time.Until(r.op.deadline) / 2)}
	renewals := r.ask(func(i int) (Grant, error) { return r.nodes[i].renew(half, r.few(), r.ballot, r.lease) })
	takes := make(chan vote, len(r.nodes))
	var lacking []int
	heal, done := false, false
	for renewing, taking := len(r.nodes), 0; renewing+taking > 0; {
		select {
		case v := <-renewals:
			renewing--
			before := len(t.lost)
			t.add(v.grant, v.err)
			if len(t.lost) > before {
				lacking = append(lacking, v.node)
			}
		case v := <-takes:
			taking--
			t.add(v.grant, v.err)
		}
		heal = heal || !r.foreign && (t.agrees() || len(t.lost)+renewing < r.need)
		if heal {
			for _, i := range lacking {
				taking++
				r.tasks.Go(func() {
					grant, err := r.take(r.op, r.ballot, r.lease, i)
					takes <- vote{i, grant, err}
				})
			}
			lacking, t.lost = nil, nil
		}
		if !done && t.released() {
			done = true
			if r.err = t.outcome(r.lease); r.err == nil {
				r.grant = t.grant()
				r.ballot.granted(r.grant)
			}
			close(r.answered)
		}
	}
}
