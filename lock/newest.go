package lock

import "slices"

// supersede tells those that were superseded here, which the Store need not tell them then: of those
// that it has given a place, all that come before the last. Who is newer than one without a place,
// the Store will say.
func (q *lines) supersede(ln *line) {
	var last int64
	for _, w := range slices.Backward(slices.Clone(ln.waiting)) {
		switch {
		case !w.supersedes:
		case w.place >= last:
			last = w.place
		case w.place != 0:
			q.stepOut(w)
			w.superseded = true
			w.given <- gift{}
		}
	}
}

func (q *lines) isSuperseded(w *waiter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return w != nil && w.superseded
}
