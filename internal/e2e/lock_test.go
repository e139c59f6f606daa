package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// Many clients at two Caddys that do not wait: never two of one name in the upstream, nothing but
// 200 and 423.
func TestTwoCaddysNeverOverlap(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	site := "redis_lock {header.X-Name}\n" + up.proxy()
	caddys := []*caddy{startCaddy(t, onRedis(server), site), startCaddy(t, onRedis(server), site)}
	const clients, requests = 64, 10
	var mu sync.Mutex
	statuses := make(map[int]int)
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			client := newClient(t)
			for range requests {
				a := do(t.Context(), client, http.MethodPost, caddys[i%2].url+"/", "", "X-Name", "name"+strconv.Itoa(i/2%4))
				if a.err != nil {
					t.Error(a.err)
					return
				}
				mu.Lock()
				statuses[a.StatusCode]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if most := up.overlap(); most != 1 {
		t.Errorf("%d requests of one name ran at the same time", most)
	}
	if statuses[200]+statuses[423] != clients*requests || statuses[200] == 0 || statuses[423] == 0 {
		t.Errorf("statuses %v, want 200 and 423", statuses)
	}
	noKeys(t, server)
}

// A client that has its answer never meets its own lock, on one connection or on many.
func TestSequentialClientNeverMeetsItsOwnLock(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte("done")) })
	c := startCaddy(t, onRedis(server), "redis_lock\n"+up.proxy())
	client := newClient(t)
	for i := range 300 {
		if a := do(t.Context(), client, http.MethodPost, c.url+"/hook", "x"); a.err != nil || a.StatusCode != 200 || a.body != "done" {
			t.Fatalf("request %d: %+v", i, a)
		}
	}
}

func TestFirstComeFirstServed(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "wait 1m"), "redis_lock /hook deploy\n"+up.proxy()+probes(7))
	up.holdAll()
	var answers []<-chan answer
	for i := range 8 {
		answers = append(answers, inFlight(t, c.url+"/hook", "X-Id", strconv.Itoa(i)))
		if i == 0 {
			await(t, "the first to run", func() bool { return up.runs() == 1 })
		} else {
			awaitWaiting(t, c, i)
		}
	}
	up.letGo()
	for _, a := range answers {
		wantStatus(t, <-a, 200)
	}
	if order := strings.Join(up.order(), ""); order != "01234567" {
		t.Errorf("served in the order %s", order)
	}
}

// probes are routes that tell how many requests wait for the name deploy: whoever finds n
// places taken is told that the line is full.
func probes(most int) string {
	var b strings.Builder
	for n := 1; n <= most; n++ {
		fmt.Fprintf(&b, "\nhandle /waiting/%d {\nredis_lock deploy {\nwait 1ms\nqueue %d\n}\n}", n, n)
	}
	return b.String() + outcomePage
}

// awaitWaiting waits until n requests stand in line for deploy at a Caddy with probes.
func awaitWaiting(t *testing.T, c *caddy, n int) {
	t.Helper()
	client := newClient(t)
	await(t, strconv.Itoa(n)+" to wait", func() bool {
		a := do(t.Context(), client, http.MethodPost, fmt.Sprintf("%s/waiting/%d", c.url, n), "")
		return a.err == nil && strings.HasPrefix(a.body, "full ")
	})
}

func TestWaitRunsOut(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "wait 200ms"), "redis_lock\n"+up.proxy()+outcomePage)
	first := up.occupy(t, c.url+"/hook")
	a := post(t, c.url+"/hook", 423)
	if !strings.HasPrefix(a.body, "timeout ") {
		t.Errorf("page %q, want outcome timeout", a.body)
	}
	up.letGo()
	wantStatus(t, <-first, 200)
}

func TestLineIsFull(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "wait 1m"), `redis_lock /patient deploy
	redis_lock /hook deploy {
		queue 1
	}
	`+up.proxy()+probes(1))
	first := up.occupy(t, c.url+"/hook")
	second := inFlight(t, c.url+"/patient") // not turned away by a probe that happens to stand in line
	awaitWaiting(t, c, 1)
	a := post(t, c.url+"/hook", 423)
	if !strings.HasPrefix(a.body, "full ") {
		t.Errorf("page %q, want outcome full", a.body)
	}
	up.letGo()
	wantStatus(t, <-first, 200)
	wantStatus(t, <-second, 200)
}

// outcomePage shows what error routes can see.
const outcomePage = `
	handle_errors {
		respond "{http.redis_lock.outcome} {http.redis_lock.name} {http.redis_lock.retry_after} {err.status_code} {err.message}"
	}`

func TestKeyWhileHeld(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "lease 30s", "prefix hooks."), "redis_lock deploy\n"+up.proxy())
	up.holdAll()
	before := server.Now(t).Unix()
	first := inFlight(t, c.url+"/")
	await(t, "the request to run", func() bool { return up.runs() == 1 })
	text, err := server.Client.Get(context.Background(), "hooks.deploy").Result()
	if err != nil {
		t.Fatal(err)
	}
	end, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		t.Fatalf("the key holds %q, want a plain integer", text)
	}
	if now := server.Now(t).Unix(); end < before+30 || end > now+32 {
		t.Errorf("the key holds %d, want between %d and %d", end, before+30, now+32)
	}
	up.letGo()
	wantStatus(t, <-first, 200)
	if server.Client.Exists(t.Context(), "hooks.deploy").Val() != 0 {
		t.Error("the key is still there after the answer")
	}
}

// A program that speaks the published algorithm shares the lock.
func TestForeignHolder(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock deploy\n"+up.proxy())
	now := server.Now(t).Unix()

	server.Client.Set(t.Context(), "lock.deploy", now+1000, 0)
	post(t, c.url, 423)
	if got := server.Client.Get(t.Context(), "lock.deploy").Val(); got != strconv.FormatInt(now+1000, 10) {
		t.Errorf("the key of a live holder became %q", got)
	}

	server.Client.Set(t.Context(), "lock.deploy", now-1, 0) // dead, and no TTL
	post(t, c.url, 200)
	if server.Client.Exists(t.Context(), "lock.deploy").Val() != 0 {
		t.Error("the key is still there after the answer")
	}
}

func TestRequestWithoutLockCausesNoRedisCommand(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock /hooks/*\n"+up.proxy())
	connections := func() string {
		info := server.Client.Info(t.Context(), "stats").Val()
		_, rest, _ := strings.Cut(info, "total_connections_received:")
		count, _, _ := strings.Cut(rest, "\r")
		return count
	}
	before := connections()
	client := newClient(t)
	for range 20 {
		for _, method := range []string{"GET", "HEAD", "OPTIONS", "PROPFIND"} {
			wantStatus(t, do(t.Context(), client, method, c.url+"/hooks/1", ""), 200)
		}
		wantStatus(t, do(t.Context(), client, http.MethodPost, c.url+"/else", ""), 200)
	}
	if after := connections(); after != before {
		t.Errorf("%s connections to Redis, %s before", after, before)
	}
	if commands := server.Commands(t); len(commands) != 0 {
		t.Errorf("commands %v were sent to Redis", commands)
	}
	wantStatus(t, do(t.Context(), client, http.MethodPost, c.url+"/hooks/1", ""), 200)
	if commands := server.Commands(t); commands["evalsha"] == 0 {
		t.Errorf("commands %v: this test sees nothing", commands)
	}
}

// An aborted request gives its lock back.
func TestAbortReleases(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/truncated" {
			w.Header().Set("Content-Length", "1000000")
			_, _ = w.Write(make([]byte, 500_000))
			panic(http.ErrAbortHandler)
		}
	})
	c := startCaddy(t, onRedis(server, "lease 24h"), `redis_lock deploy
	abort /abort
	error /error 500
	`+up.proxy())
	for _, path := range []string{"/abort", "/truncated"} {
		if a := do(t.Context(), newClient(t), http.MethodPost, c.url+path, ""); a.err == nil {
			t.Errorf("%s: status %d, want an aborted response", path, a.StatusCode)
		}
		post(t, c.url, 200)
	}
	post(t, c.url+"/error", 500)
	post(t, c.url, 200)
	if keys := server.Client.Keys(t.Context(), "lock.*").Val(); len(keys) != 0 {
		t.Errorf("keys %v are left", keys)
	}
}

// The sender hangs up, the app works on: the lock stays.
func TestHangUpKeepsLock(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock deploy\n"+up.proxy())
	up.hangUp(t, newClient(t), c.url)
	for range 20 {
		post(t, c.url, 423)
	}
	up.letGo()
	await(t, "the lock to be released", func() bool {
		return server.Client.Exists(t.Context(), "lock.deploy").Val() == 0
	})
	post(t, c.url, 200)
	if most := up.overlap(); most != 1 {
		t.Errorf("%d requests ran at the same time", most)
	}
}
