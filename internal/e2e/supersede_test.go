package e2e

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// burst sends requests to the Caddys in turn, each when the one before is the one that waits. The first of them
// runs, and is held in the app.
func burst(t *testing.T, server *redistest.Server, up *upstream, n int, caddys ...*caddy) (answers []<-chan answer) {
	t.Helper()
	answers = append(answers, up.occupy(t, caddys[0].url, "X-Id", "0"))
	var waits string
	for i := 1; i < n; i++ {
		answers = append(answers, inFlight(t, caddys[i%len(caddys)].url, "X-Id", strconv.Itoa(i)))
		await(t, fmt.Sprintf("request %d to be the one that waits", i), func() bool {
			line := server.Client.ZRange(t.Context(), "{lock.deploy}:line", 0, -1).Val()
			if len(line) != 1 || line[0] == waits {
				return false
			}
			waits = line[0]
			return true
		})
	}
	return answers
}

func TestBurstRunsFirstAndLast(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	const site = "redis_lock deploy {\nwait 1m\nsupersede\n}\n"
	one, two := startCaddy(t, onRedis(server), site+up.proxy()), startCaddy(t, onRedis(server), site+up.proxy())
	answers := burst(t, server, up, 10, one, two)
	for _, a := range answers[1:9] {
		wantStatus(t, <-a, 202) // while the first still runs
	}
	up.letGo()
	wantStatus(t, <-answers[0], 200)
	wantStatus(t, <-answers[9], 200)
	if order := up.order(); !slices.Equal(order, []string{"0", "9"}) {
		t.Errorf("ran %v, want the first and the last", order)
	}
	noTrace(t, server)
}

// Who hangs up does not take the newest with it; nor does a reload.
func TestNewestStays(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	site := "redis_lock deploy {\nwait 1m\nsupersede 204\n}\n" + up.proxy()
	c := startCaddy(t, onRedis(server), site)
	answers := burst(t, server, up, 2, c)
	ctx, hangUp := context.WithCancel(t.Context())
	gone := make(chan answer)
	go func() { gone <- do(ctx, newClient(t), http.MethodPost, c.url, "newest", "X-Id", "newest") }()
	wantStatus(t, <-answers[1], 204)
	hangUp()
	<-gone
	c.reload(t, c.config(onRedis(server, "lease 20s"), site))
	up.letGo()
	wantStatus(t, <-answers[0], 200)
	await(t, "the newest to run", func() bool { return slices.Equal(up.order(), []string{"0", "newest"}) })
	c.awaitQuiet(t)
}

// The displaced one's answer can be an error, which gets its form by handle_errors.
func TestSupersededAsError(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock deploy {\nwait 1m\nsupersede 409\n}\n"+up.proxy()+
		"\nhandle_errors {\nrespond \"{http.redis_lock.outcome}: {err.message}\"\n}")
	answers := burst(t, server, up, 3, c)
	displaced := <-answers[1]
	wantStatus(t, displaced, 409)
	if want := "superseded: a newer request has taken the place in line"; displaced.body != want || displaced.Header.Get("Retry-After") != "" {
		t.Errorf("answered %q, Retry-After %q; want %q and none", displaced.body, displaced.Header.Get("Retry-After"), want)
	}
	up.letGo()
	wantStatus(t, <-answers[0], 200)
	wantStatus(t, <-answers[2], 200)
}

// The one that waits cannot run: that is in the log with its name, as nobody runs in its place.
func TestNewestThatCannotRun(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		wait      string
		meanwhile func(*redistest.Server)
		status    int
	}{
		"wait runs out": {"1s", func(*redistest.Server) {}, 423},
		"redis is away": {"3s", (*redistest.Server).Kill, 503},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			up := startUpstream(t, nil)
			site := "redis_lock deploy {\nwait " + c.wait + "\nsupersede\n}\n" + up.proxy()
			one, two := startCaddy(t, onRedis(server), site), startCaddy(t, onRedis(server), site)
			answers := burst(t, server, up, 2, one, two)
			c.meanwhile(server)
			wantStatus(t, <-answers[1], c.status)
			two.awaitLog(t, `the newest request was not served`)
			two.awaitLog(t, `"name":"deploy"`)
			up.letGo()
			wantStatus(t, <-answers[0], 200)
		})
	}
}

// A delivery that is sent again while it runs is older than the one that waits.
func TestRedeliveryDisplacesNobody(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock deploy {\nwait 1m\nsupersede\ndedupe {header.X-Id}\n}\n"+up.proxy())
	answers := burst(t, server, up, 2, c)
	post(t, c.url, 202, "X-Id", "0")
	up.letGo()
	for _, a := range answers {
		wantStatus(t, <-a, 200)
	}
	if order := up.order(); !slices.Equal(order, []string{"0", "1"}) {
		t.Errorf("ran %v, want both, once", order)
	}
}

// Redis hangs, and the sender of the delivery that runs sends it again, as it has no answer: the newest runs.
func TestRedeliveryWhileRedisHangs(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, "redis_lock {\nredis "+server.Addr+" {\ndial_timeout 100ms\nop_timeout 200ms\n}\nlease 1m\n}",
		"redis_lock deploy {\nwait 1m\nsupersede\ndedupe {header.X-Id}\n}\n"+up.proxy())
	answers := burst(t, server, up, 2, c)
	server.Pause()
	again := inFlight(t, c.url, "X-Id", "0")
	c.awaitLog(t, "redis is unavailable")
	server.Resume()
	wantStatus(t, <-again, 202)
	up.letGo()
	for _, a := range answers {
		wantStatus(t, <-a, 200)
	}
	if order := up.order(); !slices.Equal(order, []string{"0", "1"}) {
		t.Errorf("ran %v, want both", order)
	}
}

// A Caddy is stopped with the one that waits. A newer one runs at another Caddy meanwhile, and is the last.
func TestOlderDoesNotRunLast(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	const site = "redis_lock deploy {\nwait 1m\nsupersede\n}\n"
	one, two := startCaddy(t, onRedis(server), site+up.proxy()), startCaddy(t, onRedis(server), site+up.proxy())
	answers := burst(t, server, up, 2, one, two)
	two.stop()
	up.letGo()
	wantStatus(t, <-answers[0], 200)
	post(t, one.url, 200, "X-Id", "newest") // when it turns out that nobody is there
	two.cont()
	wantStatus(t, <-answers[1], 202)
	if order := up.order(); !slices.Equal(order, []string{"0", "newest"}) {
		t.Errorf("ran %v", order)
	}
}

// Caddy exits, and with it the newest, whose sender has hung up, or waits with a body beyond the buffer: that is
// in the log.
func TestExitWithTheNewest(t *testing.T) {
	t.Parallel()
	for _, buffer := range []string{"1MiB", "3"} {
		t.Run(buffer, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			up := startUpstream(t, nil)
			site := "redis_lock deploy {\nwait 1m\nsupersede\nbuffer " + buffer + "\n}\n" + up.proxy()
			one, exits := startCaddy(t, onRedis(server), site), startCaddy(t, "grace_period 1s\n"+onRedis(server), site)
			answers := burst(t, server, up, 2, one)
			ctx, hangUp := context.WithCancel(t.Context())
			defer hangUp()
			gone := make(chan answer)
			go func() { gone <- do(ctx, newClient(t), http.MethodPost, exits.url, "newest", "X-Id", "newest") }()
			wantStatus(t, <-answers[1], 202)
			if buffer == "1MiB" {
				hangUp()
				<-gone
			}
			exits.terminate()
			<-exits.ended
			if buffer != "1MiB" {
				<-gone
			}
			for _, text := range []string{"the newest request was not served", `"name":"deploy"`} {
				if !strings.Contains(exits.log.String(), text) {
					t.Errorf("%q is not in the log", text)
				}
			}
			if n := inLine(t, server, "deploy"); n != 0 {
				t.Errorf("%d left in line", n)
			}
			up.letGo()
			wantStatus(t, <-answers[0], 200)
		})
	}
}

// Who is refused because Redis is away has displaced nobody, and is not reported as if it had.
func TestNoReportOfThoseWhoNeverWaited(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock deploy {\nwait 1m\nsupersede\n}\n"+up.proxy())
	server.Kill()
	for range 3 {
		post(t, c.url, 503)
	}
	c.terminate()
	<-c.ended
	if strings.Contains(c.log.String(), "the newest request was not served") {
		t.Error("reported")
	}
}

func TestReadmeNewestWins(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startExample(t, "redis_lock /deploy deploy {", onRedis(server), up.addr())
	c.url += "/deploy"
	answers := burst(t, server, up, 10, c)
	up.letGo()
	for i, a := range answers {
		if i == 0 || i == 9 {
			wantStatus(t, <-a, 200)
		} else {
			wantStatus(t, <-a, 202)
		}
	}
	if order := up.order(); !slices.Equal(order, []string{"0", "9"}) {
		t.Errorf("ran %v, want the first and the last", order)
	}
}
