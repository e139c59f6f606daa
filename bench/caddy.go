package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// buildCaddy builds the one Caddy that serves all sites.
func buildCaddy(ctx context.Context, dir string) (string, error) {
	progress("building Caddy")
	program := filepath.Join(dir, "caddy")
	build := exec.CommandContext(ctx, "go", "build", "-o", program,
		"github.com/caddy-redis-lock/caddy-redis-lock/bench/caddy")
	if output, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build (run this in the folder bench): %w\n%s", err, output)
	}
	return program, nil
}

// A caddy is a process with one site: a directive, if any, in front of an upstream.
type caddy struct {
	*process
	address string
}

// startCaddy starts one. It may keep more idle connections to the upstream than the 32 that
// are Caddy's default: with more visitors than that, a site would be busy connecting, and hide
// what a lock costs.
func startCaddy(ctx context.Context, program, directive, upstream string) (*caddy, error) {
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(program), "site")
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "Caddyfile")
	caddyfile := fmt.Sprintf(`{
	admin off
	persist_config off
	order bench_setnx before reverse_proxy
}

http://%s {
	%s
	reverse_proxy %s {
		transport http {
			keepalive_idle_conns_per_host 256
		}
	}
}
`, address, directive, upstream)
	if err := os.WriteFile(config, []byte(caddyfile), 0o600); err != nil {
		return nil, err
	}
	p, err := startProcess(ctx, dir, address, program, "run", "--adapter", "caddyfile", "--config", config)
	if err != nil {
		return nil, err
	}
	return &caddy{p, address}, nil
}

// sitesPlan says how much is measured of Caddy with locks that nobody else wants.
type sitesPlan struct {
	connections int
	rounds      int
	length      time.Duration // of a slice at full load
	visits      int           // of each site per round at low load
}

// A siteMeasure is one site in one round.
type siteMeasure struct {
	post, get      float64 // requests per second, get only where it was measured
	lowP50, lowP99 time.Duration
}

func (m *siteMeasure) p50() float64 { return micros(m.lowP50) }
func (m *siteMeasure) p99() float64 { return micros(m.lowP99) }

// sites is what the section found, by site.
type sites struct {
	plan        sitesPlan
	runs        map[string]series[siteMeasure]
	getCommands float64 // that Redis got from our site's GETs; NaN if not counted
	gets        int     // how many those were
	out         dropouts
}

// names of the sites, in the order of the tables: without is what the others are compared with.
var siteNames = []string{without, plain, ours}

func (s *sites) posts(name string) []float64 {
	return s.runs[name].of(func(m *siteMeasure) float64 { return m.post })
}

func (s *sites) gotten(name string) []float64 {
	return s.runs[name].of(func(m *siteMeasure) float64 { return m.get })
}

// added is how much longer than the site without a lock another one takes, in microseconds.
func (s *sites) added(name string, latency func(*siteMeasure) float64) []float64 {
	values, base := s.runs[name].of(latency), s.runs[without].of(latency)
	for i := range values {
		values[i] -= base[i]
	}
	return values
}

func runSites(ctx context.Context, server *redisServer, program string, plan sitesPlan) (*sites, error) {
	app, err := startUpstream(nil)
	if err != nil {
		return nil, err
	}
	defer app.close()
	s := &sites{plan: plan, runs: make(map[string]series[siteMeasure]), getCommands: math.NaN(), out: make(dropouts)}
	running := make(map[string]*caddy)
	defer func() {
		for _, c := range running {
			c.kill()
		}
	}()
	for name, directive := range map[string]string{
		without: "",
		plain:   "bench_setnx {http.request.header.X-Id} " + server.address,
		ours:    "redis_lock {\n\t\tname {http.request.header.X-Id}\n\t\tredis " + server.address + "\n\t}",
	} {
		if running[name], err = startCaddy(ctx, program, directive, app.address()); err != nil {
			delete(running, name)
			return nil, err
		}
		s.runs[name] = make(series[siteMeasure], plan.rounds)
	}
	for round := range plan.rounds {
		progress("Caddy, round %d of %d", round+1, plan.rounds)
		if err := server.forget(ctx); err != nil {
			return nil, err
		}
		if err := s.measure(ctx, running, round); err != nil {
			return nil, err
		}
	}
	if s.out[ours] != nil {
		return s, nil
	}
	progress("Caddy, counting the calls to Redis of GETs")
	calls, err := server.calls(ctx, func() error {
		rate, err := throughput(ctx, running[ours].address, "GET", plan.connections, plan.length)
		s.gets = int(rate * plan.length.Seconds())
		return err
	})
	if err != nil {
		return nil, err
	}
	s.getCommands = float64(calls)
	return s, nil
}

func (s *sites) measure(ctx context.Context, running map[string]*caddy, round int) error {
	for _, name := range rotated(siteNames, round) {
		if s.out[name] != nil {
			continue
		}
		m := new(siteMeasure)
		var err error
		if m.post, err = throughput(ctx, running[name].address, "POST", s.plan.connections, s.plan.length); err == nil && name != plain {
			m.get, err = throughput(ctx, running[name].address, "GET", s.plan.connections, s.plan.length)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			s.out.drop(name, round, err)
			continue
		}
		s.runs[name][round] = m
	}
	return s.measureLow(ctx, running, round)
}

// measureLow sends one request at a time, to each site in turn: nothing else runs then.
func (s *sites) measureLow(ctx context.Context, running map[string]*caddy, round int) error {
	order := rotated(siteNames, round)
	lone := make(map[string]*visitor)
	defer func() { leave(slices.Collect(maps.Values(lone))) }()
	for _, name := range order {
		if s.runs[name][round] == nil {
			continue
		}
		v, err := newVisitor(ctx, running[name].address, "POST", time.Minute)
		if err != nil {
			return err
		}
		lone[name] = v
	}
	const warmUp = 20
	latencies := make(map[string][]time.Duration)
	for visit := range warmUp + s.plan.visits {
		for _, name := range order {
			if s.runs[name][round] == nil {
				continue
			}
			begin := time.Now()
			if err := lone[name].visit(); err != nil {
				s.out.drop(name, round, fmt.Errorf("one request at a time: %w", err))
				s.runs[name][round] = nil
			} else if visit >= warmUp {
				latencies[name] = append(latencies[name], time.Since(begin))
			}
		}
	}
	for name, sorted := range latencies {
		slices.Sort(sorted)
		if m := s.runs[name][round]; m != nil {
			m.lowP50, m.lowP99 = quantile(sorted, .50), quantile(sorted, .99)
		}
	}
	return nil
}
