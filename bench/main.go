// Command bench measures what a lock costs: this repository's library beside others, and Caddy
// with and without the module, all against one redis-server of its own. The contenders take
// turns within each round, and what counts is the ratio of two in the same round: a busy machine
// disturbs both.
//
//	go run .                       everything, in some minutes
//	go run . -quick                a glance, in less than a minute
//	go run . -run contended,caddy  some sections
//	go run . -out DIR              writes results.md and results.svg, too
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9/logging"
)

func main() {
	logging.Disable() // errors are returned, too
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// Sections, as -run names them.
var sections = []string{"uncontended", "contended", "caddy"}

func run(ctx context.Context, args []string) error {
	if len(args) == 3 && args[0] == workerCommand {
		return work(ctx, args[1], args[2], os.Stdin, os.Stdout)
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	quick := flags.Bool("quick", false, "a glance: few and short rounds")
	only := flags.String("run", strings.Join(sections, ","), "`sections` to run")
	out := flags.String("out", "", "`folder` for results.md and results.svg; none are written without")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unknown argument %q", flags.Arg(0))
	}
	wanted := strings.Split(*only, ",")
	for _, section := range wanted {
		if !slices.Contains(sections, section) {
			return fmt.Errorf("-run %s: the sections are %s", section, strings.Join(sections, ", "))
		}
	}
	p := thorough
	if *quick {
		p = glance
	}
	found, err := measure(ctx, p, wanted)
	if err != nil {
		return err
	}
	if err := found.text(os.Stdout); err != nil {
		return err
	}
	if *out == "" {
		return nil
	}
	return found.write(*out)
}

// A plan says how much is measured.
type plan struct {
	pairs   pairsPlan
	contend contendPlan // of the processes of a library, and of the Caddys
	sites   sitesPlan
}

var thorough = plan{
	pairs: pairsPlan{callers: []int{1, 16, 64, 256}, rounds: 15, length: 250 * time.Millisecond},
	contend: contendPlan{
		processes: 3, callers: 50, hold: 5 * time.Millisecond, think: 20 * time.Millisecond,
		rounds: 5, warmUp: 500 * time.Millisecond, length: 4 * time.Second,
	},
	sites: sitesPlan{connections: 64, rounds: 25, length: 350 * time.Millisecond, visits: 200},
}

var glance = plan{
	pairs: pairsPlan{callers: thorough.pairs.callers, rounds: 2, length: 150 * time.Millisecond},
	contend: contendPlan{
		processes: 3, callers: 50, hold: 5 * time.Millisecond, think: 20 * time.Millisecond,
		rounds: 1, warmUp: 500 * time.Millisecond, length: 2 * time.Second,
	},
	sites: sitesPlan{connections: 64, rounds: 4, length: 200 * time.Millisecond, visits: 100},
}

// measure runs sections against a redis-server that lives as long as it runs.
func measure(ctx context.Context, p plan, wanted []string) (*findings, error) {
	dir, err := os.MkdirTemp("", "redis-lock-bench")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	server, err := startRedis(ctx, filepath.Join(dir, "redis"))
	if err != nil {
		return nil, err
	}
	defer server.stop()
	version, err := server.info(ctx, "server", "redis_version")
	if err != nil {
		return nil, err
	}
	found := &findings{machine: fmt.Sprintf("%d CPUs, Redis %s, %s, %s/%s",
		runtime.NumCPU(), version, runtime.Version(), runtime.GOOS, runtime.GOARCH)}
	if slices.Contains(wanted, "uncontended") {
		if found.uncontended, err = runUncontended(ctx, server, p.pairs); err != nil {
			return nil, fmt.Errorf("uncontended: %w", err)
		}
	}
	if slices.Contains(wanted, "contended") {
		if found.contended, err = runContended(ctx, server, p.contend); err != nil {
			return nil, fmt.Errorf("contended: %w", err)
		}
	}
	if slices.Contains(wanted, "caddy") {
		program, err := buildCaddy(ctx, dir)
		if err != nil {
			return nil, err
		}
		if found.sites, err = runSites(ctx, server, program, p.sites); err != nil {
			return nil, fmt.Errorf("caddy: %w", err)
		}
		if found.caddies, err = runCaddies(ctx, server, program, p.contend); err != nil {
			return nil, fmt.Errorf("contended caddys: %w", err)
		}
	}
	return found, nil
}

// write leaves the results where the README finds them.
func (f *findings) write(dir string) error {
	var text, picture strings.Builder
	f.markdown(&text)
	if err := f.plot(&picture); err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "results.md"), []byte(text.String()), 0o644),
		os.WriteFile(filepath.Join(dir, "results.svg"), []byte(picture.String()), 0o644),
	)
}
