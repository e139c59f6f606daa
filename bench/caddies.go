package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// A caddiesMeasure is one round of several Caddys whose requests all want the same lock. What
// is held is the app: its intervals are seen from there.
type caddiesMeasure struct {
	contendMeasure
	proxy time.Duration // what the proxy itself needs between two requests, see proxyGap
}

// share counts only the gaps beyond what the proxy itself needs.
func (m *caddiesMeasure) share() float64 {
	return m.contendMeasure.share() + float64(m.acquired)*m.proxy.Seconds()/m.window.Seconds()
}

// caddies is what the section found.
type caddies struct {
	plan  contendPlan
	runs  series[caddiesMeasure]
	calls float64 // to Redis, per request served; NaN if not counted
	out   dropouts
}

// A slowApp holds each request for a while, and remembers when, by the number of the visitor.
type slowApp struct {
	*upstream
	mu   sync.Mutex
	held map[uint64][]interval
}

func startSlowApp(hold time.Duration) (*slowApp, error) {
	a := &slowApp{held: make(map[uint64][]interval)}
	var err error
	a.upstream, err = startUpstream(func(id uint64) {
		from := monotonic()
		time.Sleep(hold)
		a.mu.Lock()
		defer a.mu.Unlock()
		a.held[id] = append(a.held[id], interval{from, monotonic()})
	})
	return a, err
}

// take returns what visitors 0 to n-1 had, and forgets it.
func (a *slowApp) take(n int) [][]interval {
	a.mu.Lock()
	defer a.mu.Unlock()
	held := make([][]interval, n)
	for id := range held {
		held[id] = a.held[uint64(id)]
	}
	clear(a.held)
	return held
}

func runCaddies(ctx context.Context, server *redisServer, program string, plan contendPlan) (*caddies, error) {
	app, err := startSlowApp(plan.hold)
	if err != nil {
		return nil, err
	}
	defer app.close()
	var running []*caddy
	defer func() {
		for _, c := range running {
			c.kill()
		}
	}()
	start := func(directive string) (*caddy, error) {
		c, err := startCaddy(ctx, program, directive, app.address())
		if err == nil {
			running = append(running, c)
		}
		return c, err
	}
	bare, err := start("")
	if err != nil {
		return nil, err
	}
	var addresses []string
	for range plan.processes {
		c, err := start("redis_lock deploy {\n\t\twait 1m\n\t\tqueue 1000\n\t\tredis " + server.address + "\n\t}")
		if err != nil {
			return nil, err
		}
		addresses = append(addresses, c.address)
	}

	s := &caddies{plan: plan, runs: make(series[caddiesMeasure], plan.rounds), calls: math.NaN(), out: make(dropouts)}
	for round := range plan.rounds {
		progress("%d Caddys, round %d of %d", plan.processes, round+1, plan.rounds)
		proxy, err := app.proxyGap(ctx, bare.address, plan.length/4)
		if err != nil {
			return nil, err
		}
		w, err := visitAll(ctx, addresses, plan, plan.length)
		held := app.take(plan.callers)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			s.out.drop(ours, round, err)
			return s, nil
		}
		s.runs[round] = &caddiesMeasure{contendMeasure{useOf(held, w), w.To - w.From, 0}, proxy}
	}
	progress("%d Caddys, counting calls to Redis", plan.processes)
	calls, err := server.calls(ctx, func() error {
		_, err := visitAll(ctx, addresses, plan, plan.length/2)
		return err
	})
	if err != nil {
		return nil, err
	}
	s.calls = float64(calls) / float64(lengthOf(app.take(plan.callers)))
	return s, nil
}

// proxyGap is the time that passes in the app between one request's end and the next one's
// beginning, if a single visitor sends them through a Caddy without a lock, less what passes if
// it sends them to the app itself.
func (a *slowApp) proxyGap(ctx context.Context, proxy string, length time.Duration) (time.Duration, error) {
	var gaps [2]time.Duration
	for i, address := range []string{a.address(), proxy} {
		v, err := newVisitor(ctx, address, "POST", length+patience)
		if err != nil {
			return 0, err
		}
		begin := monotonic()
		for end := begin + length; err == nil && monotonic() < end; {
			err = v.visitAs(0)
		}
		leave([]*visitor{v})
		held := a.take(1)
		if err != nil {
			return 0, fmt.Errorf("a single visitor: %w", err)
		}
		gaps[i] = quantile(useOf(held, window{begin, monotonic()}).gaps, .50)
	}
	return max(0, gaps[1]-gaps[0]), nil
}

// visitAll sends the callers' requests, spread over the addresses, and returns the window
// that counts.
func visitAll(ctx context.Context, addresses []string, plan contendPlan, length time.Duration) (window, error) {
	all, err := visitors(ctx, addresses, "POST", plan.callers, plan.warmUp+length+patience)
	if err != nil {
		return window{}, err
	}
	defer leave(all)
	from := monotonic() + plan.warmUp
	w := window{from, from + length}
	think := func() { time.Sleep(plan.think/2 + rand.N(plan.think)) }
	errs := make([]error, len(all))
	var running sync.WaitGroup
	for i, v := range all {
		running.Go(func() {
			for think(); monotonic() < w.To && errs[i] == nil; think() {
				errs[i] = v.visitAs(uint64(i))
			}
		})
	}
	running.Wait()
	return w, firstOf(errs)
}

// gapsBeyond returns a quantile of the gaps, less what the proxy itself needs, in microseconds.
func (m *caddiesMeasure) gapsBeyond(q float64) float64 {
	return micros(max(0, quantile(m.gaps, q)-m.proxy))
}
