package main

import (
	"context"
	"fmt"
	"time"
)

// pairsPlan says how much is measured of locks that nobody else wants.
type pairsPlan struct {
	callers []int
	rounds  int
	length  time.Duration // of a slice
}

type pairsMeasure struct {
	pairsResult
	redisCPU time.Duration
}

func (m *pairsMeasure) rate() float64       { return float64(m.Pairs) / m.Elapsed.Seconds() }
func (m *pairsMeasure) p50() float64        { return micros(m.P50) }
func (m *pairsMeasure) p99() float64        { return micros(m.P99) }
func (m *pairsMeasure) mallocs() float64    { return float64(m.Mallocs) / float64(m.Pairs) }
func (m *pairsMeasure) clientCost() float64 { return micros(m.CPU) / float64(m.Pairs) }
func (m *pairsMeasure) redisCost() float64  { return micros(m.redisCPU) / float64(m.Pairs) }

func rateOf(s series[pairsMeasure]) []float64 { return s.of((*pairsMeasure).rate) }

// uncontended is what the section found: by contender and number of callers.
type uncontended struct {
	plan pairsPlan
	runs map[string]map[int]series[pairsMeasure]
	out  dropouts
}

// ratio compares two contenders' pairs per second.
func (u *uncontended) ratio(name, base string, callers int) spread {
	return against(rateOf(u.runs[name][callers]), rateOf(u.runs[base][callers]))
}

func runUncontended(ctx context.Context, server *redisServer, plan pairsPlan) (*uncontended, error) {
	u := &uncontended{plan, make(map[string]map[int]series[pairsMeasure]), make(dropouts)}
	workers := make(map[string]*worker)
	defer func() {
		for _, w := range workers {
			w.stop()
		}
	}()
	for _, c := range contenders {
		w, err := startWorker(ctx, c.name, server.address)
		if err != nil {
			return nil, err
		}
		workers[c.name] = w
		u.runs[c.name] = make(map[int]series[pairsMeasure])
		for _, callers := range plan.callers {
			u.runs[c.name][callers] = make(series[pairsMeasure], plan.rounds)
		}
		warmUp := order{Pairs: &pairsOrder{Callers: plan.callers[len(plan.callers)-1], Length: plan.length / 2}}
		if _, err := w.do(warmUp); err != nil {
			u.out.drop(c.name, 0, err)
		}
	}
	for round := range plan.rounds {
		progress("uncontended, round %d of %d", round+1, plan.rounds)
		if err := server.forget(ctx); err != nil {
			return nil, err
		}
		for _, callers := range plan.callers {
			for _, c := range rotated(contenders, round) {
				if u.out[c.name] != nil {
					continue
				}
				m, err := measurePairs(ctx, server, workers[c.name], pairsOrder{callers, plan.length})
				if ctx.Err() != nil {
					return nil, context.Cause(ctx)
				}
				if err != nil {
					u.out.drop(c.name, round, fmt.Errorf("%d callers: %w", callers, err))
					continue
				}
				u.runs[c.name][callers][round] = m
			}
		}
	}
	return u, nil
}

func measurePairs(ctx context.Context, server *redisServer, w *worker, o pairsOrder) (*pairsMeasure, error) {
	before, err := server.cpuTime(ctx)
	if err != nil {
		return nil, err
	}
	a, err := w.do(order{Pairs: &o})
	if err != nil {
		return nil, err
	}
	after, err := server.cpuTime(ctx)
	if err != nil {
		return nil, err
	}
	return &pairsMeasure{*a.Pairs, after - before}, nil
}
