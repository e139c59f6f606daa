package main

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// contendPlan says how much is measured of one lock that all want.
type contendPlan struct {
	processes   int
	callers     int // in all processes together
	hold, think time.Duration
	rounds      int
	warmUp      time.Duration // of a slice, not counted
	length      time.Duration // of a slice, counted
}

type contendMeasure struct {
	usage
	window time.Duration
	hung   int // callers that waited for ever, as far as anybody waited for them
}

// share is the time for which the lock was held, of all time: 1 is ideal.
func (m *contendMeasure) share() float64    { return m.held.Seconds() / m.window.Seconds() }
func (m *contendMeasure) gapP50() float64   { return micros(quantile(m.gaps, .50)) }
func (m *contendMeasure) gapP99() float64   { return micros(quantile(m.gaps, .99)) }
func (m *contendMeasure) fairness() float64 { return jain(m.counts) }
func (m *contendMeasure) hungry() float64   { return float64(starved(m.counts)) }
func (m *contendMeasure) doubled() float64  { return float64(m.overlaps) }
func (m *contendMeasure) hanging() float64  { return float64(m.hung) }

// contended is what the section found, by contender.
type contended struct {
	plan  contendPlan
	runs  map[string]series[contendMeasure]
	calls map[string]float64 // to Redis, per acquisition
	out   dropouts
}

// waiters are the contenders that can take part.
func waiters() (all []contender) {
	for _, c := range contenders {
		if c.waits {
			all = append(all, c)
		}
	}
	return all
}

func runContended(ctx context.Context, server *redisServer, plan contendPlan) (*contended, error) {
	s := &contended{plan, make(map[string]series[contendMeasure]), make(map[string]float64), make(dropouts)}
	teams := make(map[string]team)
	defer func() {
		for _, t := range teams {
			t.stop()
		}
	}()
	for _, c := range waiters() {
		s.runs[c.name] = make(series[contendMeasure], plan.rounds)
		for range plan.processes {
			w, err := startWorker(ctx, c.name, server.address)
			if err != nil {
				return nil, err
			}
			teams[c.name] = append(teams[c.name], w)
		}
	}
	for round := range plan.rounds {
		progress("contended, round %d of %d", round+1, plan.rounds)
		if err := server.forget(ctx); err != nil {
			return nil, err
		}
		for _, c := range rotated(waiters(), round) {
			if s.out[c.name] != nil {
				continue
			}
			result, w, err := teams[c.name].contend(plan, fmt.Sprintf("contended-%s-%d", c.name, round), plan.length)
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			if err != nil {
				s.out.drop(c.name, round, err)
				continue
			}
			s.runs[c.name][round] = &contendMeasure{useOf(result.Held, w), w.To - w.From, result.Hung}
		}
	}
	progress("contended, counting calls to Redis")
	for _, c := range waiters() {
		if s.out[c.name] != nil {
			continue
		}
		var result contendResult
		calls, err := server.calls(ctx, func() (err error) {
			result, _, err = teams[c.name].contend(plan, "counted-"+c.name, plan.length/2)
			return err
		})
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			s.out.drop(c.name, plan.rounds, err)
			continue
		}
		s.calls[c.name] = float64(calls) / float64(lengthOf(result.Held))
	}
	return s, nil
}

func lengthOf(held [][]interval) (n int) {
	for _, one := range held {
		n += len(one)
	}
	return n
}

// A team are the processes of one contender that want the same lock.
type team []*worker

// contend returns what the callers of all processes held, and the window that counts.
func (t team) contend(plan contendPlan, name string, length time.Duration) (contendResult, window, error) {
	from := monotonic() + 20*time.Millisecond // when the order has reached everybody
	w := window{from + plan.warmUp, from + plan.warmUp + length}
	results := make([]contendResult, len(t))
	errs := make([]error, len(t))
	var members sync.WaitGroup
	for i, member := range t {
		callers := plan.callers*(i+1)/len(t) - plan.callers*i/len(t)
		members.Go(func() {
			a, err := member.do(order{Contend: &contendOrder{name, callers, plan.hold, plan.think, from, w.To, drain}})
			if errs[i] = err; err == nil {
				results[i] = *a.Contend
			}
		})
	}
	members.Wait()
	var all contendResult
	for _, r := range results {
		all.Held = append(all.Held, r.Held...)
		all.Hung += r.Hung
	}
	return all, w, firstOf(errs)
}

func (t team) stop() {
	for _, w := range t {
		w.stop()
	}
}
