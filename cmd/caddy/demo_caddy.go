package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/caddy-redis-lock/caddy-redis-lock/examples"
)

// A storage is the line of the configuration that says where the locks live.
type storage struct {
	line  string
	shown string // the line without a password
}

// chooseStorage makes sure that the Redis answers: Caddy itself starts without it, and the
// demo would be one of 503s.
func chooseStorage(ctx context.Context, redisURL string) (storage, error) {
	if redisURL == "" {
		return storage{"memory", "memory"}, nil
	}
	u, err := url.Parse(redisURL)
	if err != nil || u.Host == "" && u.Scheme != "unix" {
		// Neither the value nor err is shown: nobody knows where in it the password is.
		return storage{}, errors.New("--redis: not a URL such as redis://user:password@127.0.0.1:6379, with special characters percent-encoded")
	}
	options, err := redis.ParseURL(redisURL)
	if err != nil {
		return storage{}, fmt.Errorf("--redis: %w", err)
	}
	if err := ping(ctx, options); err != nil {
		return storage{}, fmt.Errorf("--redis: the Redis on %s does not answer: %w", options.Addr, err)
	}
	return storage{"redis " + redisURL, "redis " + u.Redacted()}, nil
}

func ping(ctx context.Context, options *redis.Options) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	logging.Disable() // go-redis would print, as it likes, what the error says anyway
	options.MaxRetries = -1
	options.DialerRetries = 1
	options.ContextTimeoutEnabled = true
	client := redis.NewClient(options)
	defer client.Close()
	return client.Ping(ctx).Err()
}

// An address is where Caddy listens.
type address struct{ host, port string }

// chooseAddress looks for a free port if the port is 0, and refuses one that is in use: Caddy
// would share it with another Caddy that listens there, and lose half of the webhooks to it.
func chooseAddress(listen string) (address, error) {
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return address{}, fmt.Errorf("--listen %q: %w", listen, err)
	}
	defer listener.Close()
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return address{}, fmt.Errorf("--listen %q: %w", listen, err)
	}
	_, port, err := net.SplitHostPort(listener.Addr().String())
	return address{host, port}, err
}

func (a address) url() string {
	host := a.host
	if host == "" {
		host = "localhost"
	}
	return "http://" + net.JoinHostPort(host, a.port)
}

// site is how a Caddyfile begins a site here, for any Host header and without HTTPS.
func (a address) site() string {
	if a.host == "" {
		return ":" + a.port + " {\n"
	}
	return ":" + a.port + " {\n\tbind " + a.host + "\n\n"
}

// quickstart is examples/quickstart.caddy with addresses of this demo in it.
func quickstart(listen address, app, storage string) (string, error) {
	return replaceEach(examples.Quickstart,
		":8080 {\n", listen.site(),
		"reverse_proxy localhost:9000\n", "reverse_proxy "+app+"\n",
		"\t\tmemory\n", "\t\t"+storage+"\n",
	)
}

// replaceEach replaces the first of each pair, which must be there exactly once, by the second.
func replaceEach(text string, pairs ...string) (string, error) {
	for i := 0; i < len(pairs); i += 2 {
		if n := strings.Count(text, pairs[i]); n != 1 {
			return "", fmt.Errorf("examples/quickstart.caddy has %q %d times; the demo replaces it, and needs it once", pairs[i], n)
		}
	}
	return strings.NewReplacer(pairs...).Replace(text), nil
}

// startCaddy returns when Caddy serves. Unlike `caddy run` it touches nothing else on this
// machine, neither an admin port nor a file, and logs nothing but errors, to stderr.
func startCaddy(caddyfile string) error {
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), map[string]any{
		"filename": "examples/quickstart.caddy",
	})
	if err != nil {
		return fmt.Errorf("the demo's configuration: %w", err)
	}
	var config caddy.Config
	if err := json.Unmarshal(adapted, &config); err != nil {
		return fmt.Errorf("the demo's configuration: %w", err)
	}
	config.Admin = &caddy.AdminConfig{
		Disabled: true,
		Config:   &caddy.ConfigSettings{Persist: new(false)},
	}
	config.Logging = &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		caddy.DefaultLoggerName: {BaseLog: caddy.BaseLog{Level: "ERROR"}},
	}}
	config.AppsRaw["tls"] = json.RawMessage(`{"disable_storage_clean": true}`)
	if err := caddy.Run(&config); err != nil {
		return fmt.Errorf("start Caddy: %w", err)
	}
	return nil
}

// stopCaddy waits for requests that are still under way.
func stopCaddy() error {
	if err := caddy.Stop(); err != nil {
		return fmt.Errorf("stop Caddy: %w", err)
	}
	return nil
}
