package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "redis-lock",
		Usage: "<command>",
		Short: "Shows what the redis_lock handler does",
		CobraFunc: func(cmd *cobra.Command) {
			cmd.AddCommand(demoCommand())
		},
	})
}

func demoCommand() *cobra.Command {
	var d demo
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Sends overlapping webhooks through Caddy and draws which ones wait",
		Long: `
Starts a Caddy in front of a slow app, sends webhooks that overlap, and draws a
timeline: which of them waited in line, when each one ran, and which were refused.

It needs nothing but itself: the locks live in memory, or in Redis with --redis.
`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait for anything
			d.out = cmd.OutOrStdout()
			return d.run(ctx)
		},
	}
	cmd.Flags().StringVar(&d.redis, "redis", "", "`URL` of a Redis for the locks, such as redis://127.0.0.1:6379 (default memory)")
	cmd.Flags().StringVar(&d.listen, "listen", anyPort, "`host:port` for Caddy to listen on; port 0 is a free one")
	cmd.Flags().BoolVar(&d.keep, "keep", false, "go on serving after the demo, to try it with curl, until Ctrl-C")
	return cmd
}

// anyPort is a loopback address with a port that the system chooses.
const anyPort = "127.0.0.1:0"

// A demo shows the example examples/quickstart.caddy at work.
type demo struct {
	redis  string // a URL; empty: the locks live in memory
	listen string
	keep   bool
	out    io.Writer
}

// run ends with everything stopped that it started. Whatever goes wrong is an error, also a
// lock that did not hold.
func (d demo) run(ctx context.Context) (err error) {
	locks, err := chooseStorage(ctx, d.redis)
	if err != nil {
		return err
	}
	listen, err := chooseAddress(d.listen)
	if err != nil {
		return err
	}
	app, err := startApp(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, app.stop()) }()

	if err := d.printConfig(listen, app.address, locks); err != nil {
		return err
	}
	config, err := quickstart(listen, app.address, locks.line)
	if err != nil {
		return err
	}
	if err := startCaddy(config); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopCaddy()) }()

	if err := d.show(ctx, listen.url(), app); err != nil {
		return err
	}
	if d.keep {
		d.printCurl(listen.url())
		<-ctx.Done()
	}
	return nil
}

func (d demo) printConfig(listen address, app string, locks storage) error {
	config, err := quickstart(listen, app, locks.shown)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "Caddy runs examples/quickstart.caddy, with this demo's addresses:\n\n%s\n", config)
	return nil
}

// show sends the webhooks, draws what became of them, and judges it.
func (d demo) show(ctx context.Context, url string, app *slowApp) error {
	var batches []string
	for _, b := range plan {
		batches = append(batches, fmt.Sprintf("%d to %s", b.count, b.path()))
	}
	fmt.Fprintf(d.out, "Sending webhooks, one every %s: %s.\nThe app takes %s for each.\n\n",
		seconds(gap), strings.Join(batches, ", then "), seconds(workTime))
	deliveries := sendAll(ctx, url)
	if ctx.Err() != nil {
		return fmt.Errorf("the demo was stopped before its end: %w", context.Cause(ctx))
	}
	for i := range deliveries {
		deliveries[i].ran = app.runOf(deliveries[i].id())
	}
	most := app.mostAtOnce()
	fmt.Fprintf(d.out, "%s\n%s", timeline(deliveries), summary(deliveries, most))
	return verify(deliveries, most)
}

func (d demo) printCurl(url string) {
	fmt.Fprintf(d.out, `
Caddy goes on serving. Run this in two terminals, one right after the other:

  curl -i -X POST "%s/hooks/shop?work=2.5s"

The second one waits until the first is done. Press Ctrl-C here to end.
`, url)
}
