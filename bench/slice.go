package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// patience is how long a slice may take beyond its length. A contender that needs longer hangs.
const patience = 5 * time.Second

// drain is how long callers who asked for a contended lock in time may wait for it when nobody
// asks any more. With all of them in line it takes a fraction of a second.
const drain = 3 * time.Second

// errHung is the reason why a contender is given up that did not come to an end.
var errHung = errors.New("hung")

// An order is what a worker is told to do: one slice of one section.
type order struct {
	Pairs   *pairsOrder   `json:",omitempty"`
	Contend *contendOrder `json:",omitempty"`
}

// limit is when the one who gave the order stops waiting. A worker that hangs and still heeds
// its context has said so by then.
func (o order) limit() time.Duration {
	if o.Pairs != nil {
		return o.Pairs.Length + 2*patience
	}
	return o.Contend.Until - monotonic() + o.Contend.Drain + patience
}

// A pairsOrder is for callers that take and release locks that nobody else wants: each has a
// name of its own, the same all the time.
type pairsOrder struct {
	Callers int
	Length  time.Duration
}

type pairsResult struct {
	Pairs    int
	Elapsed  time.Duration
	P50, P99 time.Duration // of taking and releasing, together
	Mallocs  uint64        // of the process
	CPU      time.Duration // of the process
}

func (o pairsOrder) run(ctx context.Context, l locker) (pairsResult, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Length+patience)
	defer cancel()
	latencies := make([][]time.Duration, o.Callers)
	errs := make([]error, o.Callers)
	var before, after runtime.MemStats
	runtime.GC() // what the last slice left is not for this one to collect
	runtime.ReadMemStats(&before)
	cpuBefore, err := cpuTime()
	if err != nil {
		return pairsResult{}, err
	}
	begin := time.Now()
	var callers sync.WaitGroup
	for i := range o.Callers {
		name := fmt.Sprintf("bench-%d", i)
		callers.Go(func() {
			latencies[i], errs[i] = pairs(ctx, l, name, begin.Add(o.Length))
		})
	}
	callers.Wait()
	elapsed := time.Since(begin)
	cpuAfter, err := cpuTime()
	runtime.ReadMemStats(&after)
	if err := errors.Join(err, firstOf(errs)); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", errHung, err)
		}
		return pairsResult{}, err
	}
	all := slices.Concat(latencies...)
	slices.Sort(all)
	return pairsResult{
		Pairs:   len(all),
		Elapsed: elapsed,
		P50:     quantile(all, .50),
		P99:     quantile(all, .99),
		Mallocs: after.Mallocs - before.Mallocs,
		CPU:     cpuAfter - cpuBefore,
	}, nil
}

func pairs(ctx context.Context, l locker, name string, until time.Time) (latencies []time.Duration, err error) {
	latencies = make([]time.Duration, 0, 4096)
	nothing := func() {}
	for now := time.Now(); now.Before(until); {
		if err := l.with(ctx, name, nothing); err != nil {
			return nil, err
		}
		done := time.Now()
		latencies = append(latencies, done.Sub(now))
		now = done
	}
	return latencies, nil
}

// A contendOrder is for callers that all want the same lock, hold it and think about something
// else for a while. Without think time the caller who has just released would take the lock
// again, and it would look fast.
type contendOrder struct {
	Name        string
	Callers     int
	Hold, Think time.Duration // Think on average: it is between half and one and a half of it
	From, Until time.Duration // on the monotonic clock: nobody asks before or after
	Drain       time.Duration // how long after Until a caller who has asked may wait
}

// A contendResult has what each caller held.
type contendResult struct {
	Held [][]interval
	Hung int // callers that never got the lock they asked for
}

// run lets everybody who asked before the end have the lock: calls that are cut off would burden
// the next slice.
func (o contendOrder) run(ctx context.Context, l locker) (contendResult, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Until-monotonic()+o.Drain)
	defer cancel()
	held := make([][]interval, o.Callers)
	errs := make([]error, o.Callers)
	time.Sleep(o.From - monotonic())
	var hung atomic.Int64
	var callers sync.WaitGroup
	for i := range o.Callers {
		callers.Go(func() {
			work := func() {
				from := monotonic()
				time.Sleep(o.Hold) // somewhat longer, in truth: what counts is what is measured
				held[i] = append(held[i], interval{from, monotonic()})
			}
			for time.Sleep(o.think()); monotonic() < o.Until && errs[i] == nil; time.Sleep(o.think()) {
				errs[i] = l.with(ctx, o.Name, work)
			}
			if errs[i] != nil && ctx.Err() != nil {
				errs[i] = nil
				hung.Add(1)
			}
		})
	}
	callers.Wait()
	return contendResult{held, int(hung.Load())}, firstOf(errs)
}

func (o contendOrder) think() time.Duration { return o.Think/2 + rand.N(o.Think) }

// firstOf returns one error: all callers say the same.
func firstOf(errs []error) error {
	if i := slices.IndexFunc(errs, func(err error) bool { return err != nil }); i >= 0 {
		return errs[i]
	}
	return nil
}
