package e2e

import (
	"bufio"
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// A slow Redis is not an absent one.
func TestSlowRedis(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock deploy\n"+up.proxy())
	for range 3 {
		server.Client.Do(t.Context(), "client", "pause", "300", "all")
		post(t, c.url, 200)
	}
	if strings.Contains(c.log.String(), "redis is unavailable") {
		t.Error("a slow Redis was taken for an absent one")
	}
	noKeys(t, server)
}

// Those in line keep their place while Redis is away; then it is 503 for them, and not 423.
func TestWaitersOutlastAnOutage(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "wait 1m"), `redis_lock /hook deploy
	redis_lock /hasty deploy {
		wait 3s
	}
	`+up.proxy()+probes(2))
	server.Client.Set(t.Context(), "lock.deploy", server.Now(t).Unix()+3600, 0) // of a foreign program
	patient := inFlight(t, c.url+"/hook")
	awaitWaiting(t, c, 1)
	hasty := inFlight(t, c.url+"/hasty")
	awaitWaiting(t, c, 2)
	server.Kill()
	a := <-hasty
	wantStatus(t, a, 503)
	wantRetryAfter(t, a)
	post(t, c.url+"/hook", 503) // new, and so not one to wait
	server.Restart(t)
	wantStatus(t, <-patient, 200)
	noKeys(t, server)
	c.awaitQuiet(t)
}

// A client that leaves the line is not served, and does not hold the others up.
func TestClientLeavesTheLine(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "wait 1m"), "redis_lock /hook deploy\n"+up.proxy()+probes(2))
	first := up.occupy(t, c.url+"/hook", "X-Id", "1")
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan answer)
	go func() { left <- do(ctx, newClient(t), http.MethodPost, c.url+"/hook", "{}", "X-Id", "2") }()
	awaitWaiting(t, c, 1)
	third := inFlight(t, c.url+"/hook", "X-Id", "3")
	awaitWaiting(t, c, 2)
	leave()
	<-left
	await(t, "the line to be shorter", func() bool {
		a := do(t.Context(), newClient(t), http.MethodPost, c.url+"/waiting/2", "")
		return a.err == nil && strings.HasPrefix(a.body, "timeout ")
	})
	up.letGo()
	wantStatus(t, <-first, 200)
	wantStatus(t, <-third, 200)
	if order := strings.Join(up.order(), ""); order != "13" {
		t.Errorf("served %s, want the first and the third", order)
	}
	noKeys(t, server)
	c.awaitQuiet(t)
}

// A request whose sender has hung up is bounded by max_hold like any other.
func TestMaxHoldAfterHangUp(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "max_hold 2s"), "redis_lock deploy\n"+up.proxy())
	up.hangUp(t, newClient(t), c.url)
	await(t, "the app to be cancelled", func() bool { _, _, cancelled := up.count(); return cancelled == 1 })
	noKeys(t, server)
	c.awaitQuiet(t)
}

// Nor does a client that stops reading in the middle of a long answer keep the lock for longer.
func TestMaxHoldBoundsClientThatDoesNotRead(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		for range 1000 {
			if _, err := w.Write(make([]byte, 1<<20)); err != nil {
				return
			}
		}
	})
	c := startCaddy(t, onRedis(server, "max_hold 1s"), "redis_lock deploy\n"+up.proxy())
	conn := dial(t, c, "POST / HTTP/1.1\nHost: "+c.addr+"\nContent-Length: 0\n\n")
	line, err := bufio.NewReaderSize(conn, 16).ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "HTTP/1.1 200") {
		t.Fatalf("first line %q, %v", line, err)
	}
	noKeys(t, server)
	c.awaitQuiet(t)
}
