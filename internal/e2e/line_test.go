package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// inLine returns how many requests stand in line for the name, on all Caddys.
func inLine(t *testing.T, server *redistest.Server, name string) int {
	t.Helper()
	n, err := server.Client.ZCard(t.Context(), "{lock."+name+"}:line").Result()
	if err != nil {
		t.Fatal(err)
	}
	return int(n)
}

// lineUp sends requests to the Caddys in turn, each when the one before stands in line.
func lineUp(t *testing.T, server *redistest.Server, n int, caddys ...*caddy) []<-chan answer {
	t.Helper()
	answers := make([]<-chan answer, n)
	for i := range answers {
		answers[i] = inFlight(t, caddys[i%len(caddys)].url, "X-Id", strconv.Itoa(i))
		await(t, fmt.Sprintf("request %d to stand in line", i), func() bool { return inLine(t, server, "deploy") == i+1 })
	}
	return answers
}

// noTrace waits until nothing of the line is left in Redis, before it would expire.
func noTrace(t *testing.T, server *redistest.Server) {
	t.Helper()
	noKeys(t, server)
	if left := server.Client.Keys(t.Context(), "{lock.*}:[^h]*").Val(); len(left) != 0 {
		t.Errorf("keys %v are left of the line", left)
	}
}

// Arrival decides, at whichever Caddy: also without the right to publish and subscribe.
func TestFirstComeFirstServedOnEveryCaddy(t *testing.T) {
	t.Parallel()
	for name, rights := range map[string][]string{
		"told":      {"allchannels", "+@all"},
		"by asking": {"+@all", "-@pubsub"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			server.AddUser(t, "locker", append(rights, "allkeys")...)
			up := startUpstream(t, nil)
			global := "redis_lock {\nredis redis://locker:pass@" + server.Addr + "\nwait 1m\n}"
			one := startCaddy(t, global, "redis_lock deploy\n"+up.proxy())
			two := startCaddy(t, global, "redis_lock deploy\n"+up.proxy())
			first := up.occupy(t, one.url, "X-Id", "first")
			answers := lineUp(t, server, 10, two, one)
			up.letGo()
			wantStatus(t, <-first, 200)
			for _, a := range answers {
				wantStatus(t, <-a, 200)
			}
			if order := strings.Join(up.order(), " "); order != "first 0 1 2 3 4 5 6 7 8 9" {
				t.Errorf("served in the order %s", order)
			}
			if most := up.overlap(); most != 1 {
				t.Errorf("%d at the same time", most)
			}
			noTrace(t, server)
			for _, c := range []*caddy{one, two} {
				c.awaitQuiet(t)
				if said := strings.Count(c.log.String(), "does not tell of locks that are handed over"); said > 1 || (said == 1) != (name == "by asking") {
					t.Errorf("said %d times that redis does not tell", said)
				}
			}
		})
	}
}

// A Caddy that dies, or hangs, in line is passed by.
func TestCaddyDiesInLine(t *testing.T) {
	t.Parallel()
	for name, harm := range map[string]func(c *caddy){"killed": (*caddy).kill, "stopped": (*caddy).stop} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			up := startUpstream(t, nil)
			one := startCaddy(t, onRedis(server, "wait 1m", "lease 24h"), "redis_lock deploy\n"+up.proxy())
			two := startCaddy(t, onRedis(server, "wait 1m", "lease 24h"), "redis_lock deploy\n"+up.proxy())
			first := up.occupy(t, one.url, "X-Id", "first")
			answers := lineUp(t, server, 6, two, one)
			harm(two)
			up.letGo()
			wantStatus(t, <-first, 200)
			for i, a := range answers {
				if i%2 == 1 {
					wantStatus(t, <-a, 200)
				}
			}
			if name == "stopped" {
				two.cont()
				for i, a := range answers {
					if i%2 == 0 {
						wantStatus(t, <-a, 200)
					}
				}
			}
			if most := up.overlap(); most != 1 {
				t.Errorf("%d at the same time", most)
			}
			if order := strings.Join(up.order(), " "); !strings.HasPrefix(order, "first 1 3 5") {
				t.Errorf("served in the order %s", order)
			}
		})
	}
}

// A thousand requests wait on one Caddy and are served one at a time, in the order in which they
// came, through a reload.
func TestThousandWait(t *testing.T) {
	t.Parallel()
	const requests = 1000
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	site := "redis_lock deploy\n" + up.proxy()
	c := startCaddy(t, onRedis(server, "wait 10m", "queue 1000"), site)
	first := up.occupy(t, c.url, "X-Id", "first")
	client := &http.Client{Transport: &http.Transport{MaxIdleConns: requests, MaxIdleConnsPerHost: requests}}
	defer client.CloseIdleConnections()
	var clients sync.WaitGroup
	for i := range requests {
		if i%100 == 0 { // in tens of tens, or the test would wait for a thousand arrivals one by one
			await(t, "the others to stand in line", func() bool { return inLine(t, server, "deploy") == i })
		}
		clients.Go(func() {
			a := do(t.Context(), client, http.MethodPost, c.url, "{}", "X-Id", strconv.Itoa(i/100))
			if a.err != nil || a.StatusCode != 200 {
				t.Errorf("request %d: %v, %+v", i, a.err, a.Response)
			}
		})
	}
	await(t, "all to stand in line", func() bool { return inLine(t, server, "deploy") == requests })
	c.reload(t, c.config(onRedis(server, "wait 10m", "queue 1000", "lease 20s"), site))
	up.letGo()
	wantStatus(t, <-first, 200)
	clients.Wait()
	if most := up.overlap(); most != 1 {
		t.Errorf("%d at the same time", most)
	}
	order := up.order()
	if len(order) != requests+1 {
		t.Fatalf("%d were served", len(order))
	}
	for i, id := range order[1:] {
		if id != strconv.Itoa(i/100) {
			t.Fatalf("place %d in the order was one of the hundreds %s", i, id)
		}
	}
	noTrace(t, server)
	c.awaitQuiet(t)
}

// A program that speaks the published algorithm takes the lock while others wait for it: they
// wait for that, too, and go on in their order.
func TestForeignHolderInBetween(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "wait 1m", "on_lost continue"), "redis_lock deploy\n"+up.proxy())
	first := up.occupy(t, c.url, "X-Id", "first")
	answers := lineUp(t, server, 3, c)
	// As when the first one's lease had passed.
	server.Client.HDel(t.Context(), "{lock.deploy}:holder", "t", "e")
	server.Client.Set(t.Context(), "lock.deploy", server.Now(t).Unix()+3600, redis.KeepTTL)
	up.letGo()
	wantStatus(t, <-first, 200)
	if begun, _, _ := up.count(); begun != 1 {
		t.Errorf("%d requests ran while a foreign program had the lock", begun-1)
	}
	if n := inLine(t, server, "deploy"); n != 3 {
		t.Errorf("%d in line, want 3", n)
	}
	server.Client.Del(t.Context(), "lock.deploy")
	for _, a := range answers {
		wantStatus(t, <-a, 200)
	}
	if order := strings.Join(up.order(), " "); order != "first 0 1 2" {
		t.Errorf("served in the order %s", order)
	}
	noTrace(t, server)
}

// A client that leaves the line on one Caddy does not hold up the next on another.
func TestClientLeavesTheLineOfTwoCaddys(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	one := startCaddy(t, onRedis(server, "wait 1m", "lease 24h"), "redis_lock deploy\n"+up.proxy())
	two := startCaddy(t, onRedis(server, "wait 1m", "lease 24h"), "redis_lock deploy\n"+up.proxy())
	first := up.occupy(t, one.url, "X-Id", "first")
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan answer)
	go func() { left <- do(ctx, newClient(t), http.MethodPost, two.url, "{}", "X-Id", "left") }()
	await(t, "the second to stand in line", func() bool { return inLine(t, server, "deploy") == 1 })
	third := inFlight(t, one.url, "X-Id", "third")
	await(t, "the third to stand in line", func() bool { return inLine(t, server, "deploy") == 2 })
	leave()
	<-left
	await(t, "the second to have left the line", func() bool { return inLine(t, server, "deploy") == 1 })
	up.letGo()
	wantStatus(t, <-first, 200)
	wantStatus(t, <-third, 200)
	if order := strings.Join(up.order(), " "); order != "first third" {
		t.Errorf("served in the order %s", order)
	}
	noTrace(t, server)
}

// With `stay` a sender that hangs up while it waits is served in its turn, body and all, over
// HTTP/1.1 and HTTP/2, and the others wait until that is done.
func TestStay(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var bodies sync.Map
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Errorf("body of %s: %v", r.Header.Get("X-Id"), err)
		}
		bodies.Store(r.Header.Get("X-Id"), string(body))
	})
	c := startTLS(t, onRedis(server, "wait 1m", "on_disconnect stay"), "redis_lock deploy\n"+up.proxy())
	one, two := newClient(t), newClient(t)
	two.Transport.(*http.Transport).ForceAttemptHTTP2 = true
	await(t, "the certificate", func() bool {
		a := do(t.Context(), two, http.MethodGet, c.url, "")
		return a.err == nil && a.ProtoMajor == 2
	})
	up.holdAll()
	send := func(ctx context.Context, client *http.Client, id string) <-chan answer {
		answers := make(chan answer, 1)
		go func() { answers <- do(ctx, client, http.MethodPost, c.url, "body of "+id, "X-Id", id) }()
		return answers
	}
	first := send(t.Context(), one, "first")
	await(t, "the first to run", func() bool { return up.runs() == 1 })
	for i, client := range []*http.Client{one, two} {
		ctx, hangUp := context.WithCancel(t.Context())
		left := send(ctx, client, fmt.Sprint("left", i))
		await(t, "another to stand in line", func() bool { return inLine(t, server, "deploy") == i+1 })
		hangUp()
		<-left
	}
	last := send(t.Context(), one, "last")
	await(t, "the last to stand in line", func() bool { return inLine(t, server, "deploy") == 3 })
	up.letGo()
	wantStatus(t, <-first, 200)
	wantStatus(t, <-last, 200)
	if order := strings.TrimSpace(strings.Join(up.order(), " ")); order != "first left0 left1 last" {
		t.Errorf("served in the order %s", order)
	}
	for _, id := range []string{"left0", "left1"} {
		if body, _ := bodies.Load(id); body != "body of "+id {
			t.Errorf("body %q of %s", body, id)
		}
	}
	if most := up.overlap(); most != 1 {
		t.Errorf("%d at the same time", most)
	}
	noTrace(t, server)
	c.awaitQuiet(t)
}

// A shutdown lets those in line come to their end, also those whose sender has hung up.
func TestShutdownServesTheLine(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, "grace_period 1m\n"+onRedis(server, "wait 1m", "on_disconnect stay"), "redis_lock deploy\n"+up.proxy())
	first := up.occupy(t, c.url, "X-Id", "first")
	ctx, hangUp := context.WithCancel(t.Context())
	left := make(chan answer, 1)
	go func() { left <- do(ctx, newClient(t), http.MethodPost, c.url, "{}", "X-Id", "left") }()
	await(t, "the second to stand in line", func() bool { return inLine(t, server, "deploy") == 1 })
	last := inFlight(t, c.url, "X-Id", "last")
	await(t, "the third to stand in line", func() bool { return inLine(t, server, "deploy") == 2 })
	hangUp()
	<-left
	c.terminate()
	up.letGo()
	wantStatus(t, <-first, 200)
	wantStatus(t, <-last, 200)
	<-c.ended
	if order := strings.Join(up.order(), " "); order != "first left last" {
		t.Errorf("served in the order %s", order)
	}
	noTrace(t, server)
}
