package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// deduped is a site that takes deliveries by X-Id, and says what became of each.
func deduped(up *upstream, options ...string) string {
	return "header X-Outcome {http.redis_lock.outcome}\nheader >X-Outcome {http.redis_lock.outcome}\n" +
		"redis_lock {path} {\ndedupe {header.X-Id}\n" + strings.Join(options, "\n") + "\n}\n" + up.proxy() +
		"\nhandle_errors {\nheader X-Outcome {http.redis_lock.outcome}\nrespond {err.status_code} {\nclose\n}\n}"
}

// sends a delivery, and fails unless it is answered with status and this was the outcome.
func deliver(t *testing.T, url, id string, status int, outcome string) answer {
	t.Helper()
	a := post(t, url, status, "X-Id", id)
	if got := a.Header.Get("X-Outcome"); got != outcome {
		t.Errorf("outcome %q, want %q", got, outcome)
	}
	return a
}

// Only a complete answer that all went well ends a delivery.
func TestDeliveryReachesAppOnce(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	broken := func(answer string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			conn, buffered, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			fmt.Fprint(buffered, answer)
			buffered.Flush()
			conn.Close()
		}
	}
	status := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
	}
	answers := map[string]struct {
		app  http.HandlerFunc
		runs int // of two deliveries
	}{
		"/200":   {status(200), 1},
		"/201":   {status(201), 1},
		"/204":   {status(204), 1},
		"/body":  {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "done") }, 1},
		"/early": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(103); w.WriteHeader(200) }, 1},
		"/flushed": {func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "one")
			w.(http.Flusher).Flush()
			fmt.Fprint(w, "two")
		}, 1},
		"/302":       {status(302), 2},
		"/404":       {status(404), 2},
		"/500":       {status(500), 2},
		"/hangs-up":  {broken(""), 2},
		"/half":      {broken("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"), 2},
		"/halfchunk": {broken("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhalf"), 2},
	}
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) { answers[r.URL.Path].app(w, r) })
	for where, global := range map[string]string{"redis": onRedis(server), "memory": "redis_lock {\nmemory\n}"} {
		first, second := startCaddy(t, global, deduped(up)), startCaddy(t, global, deduped(up))
		if where == "memory" {
			second = first
		}
		for path, want := range answers {
			before, _, _ := up.count()
			for _, c := range []*caddy{first, second} {
				_ = do(t.Context(), newClient(t), http.MethodPost, c.url+path, "", "X-Id", "72d3162e")
			}
			if begun, _, _ := up.count(); begun-before != want.runs {
				t.Errorf("%s, %s: reached the app %d times, want %d", where, path, begun-before, want.runs)
			}
			deliver(t, first.url+"/200", "of-"+path, 200, "acquired") // another one
		}
		deliver(t, second.url+"/200", "72d3162e", 200, "duplicate")
	}
	// What is left of them: keys for those that were handled, without their ids.
	keys := server.Client.Keys(t.Context(), "*").Val()
	done := slices.DeleteFunc(slices.Clone(keys), func(key string) bool { return !strings.Contains(key, ":done:") })
	if want := 6 + len(answers); len(done) != want {
		t.Errorf("%d deliveries are noted, want %d: %v", len(done), want, done)
	}
	for _, key := range done {
		if ttl := server.Client.TTL(t.Context(), key).Val(); ttl <= 23*time.Hour || ttl > 24*time.Hour {
			t.Errorf("%s is kept for %v, want 24h", key, ttl)
		}
	}
	for _, key := range keys {
		if strings.Contains(key, "72d3162e") || strings.Contains(fmt.Sprint(server.Client.HGetAll(t.Context(), key).Val()), "72d3162e") {
			t.Errorf("%s has the id as it came", key)
		}
	}
}

// Deliveries end with the window, belong to a name, and are none without an id.
func TestWhatIsADelivery(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock {http.redis_lock.json.repository} {\ndedupe {http.redis_lock.json.id}-{header.X-Id} 1s\n}\n"+up.proxy())
	n := 0
	send := func(body string, id string, reaches bool) {
		t.Helper()
		a := do(t.Context(), newClient(t), http.MethodPost, c.url, body, "X-Id", id)
		wantStatus(t, a, 200)
		if reaches {
			n++
		}
		if begun, _, _ := up.count(); begun != n {
			t.Errorf("reached the app: %v, want %v", begun == n+1, reaches)
			n = begun
		}
	}
	send(`{"repository": "shop", "id": 9007199254740993}`, "a", true)
	send(`{"id": 9007199254740993, "repository": "shop"}`, "a", false)
	send(`{"repository": "shop", "id": 9007199254740992}`, "a", true)
	send(`{"repository": "blog", "id": 9007199254740993}`, "a", true)
	send(`{"repository": "shop"}`, "a", true)
	send(`{"repository": "shop"}`, "a", true)
	send(`{"repository": "shop", "id": 1}`, "", true)
	send(`{"repository": "shop", "id": 1}`, "", true)
	await(t, "the window to pass", func() bool { return len(server.Client.Keys(t.Context(), "*:done:*").Val()) == 0 })
	send(`{"repository": "shop", "id": 9007199254740993}`, "a", true)
}

func TestDeliveryUnderWay(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	at := func(options ...string) *caddy {
		return startCaddy(t, onRedis(server, "lease 1m"), deduped(up, options...))
	}
	impatient, full, waits := at(), at("wait 1m", "queue 0"), at("wait 1s", "status 503")
	first := up.occupy(t, impatient.url+"/shop", "X-Id", "x")
	for _, c := range []struct {
		caddy         *caddy
		status, other int
		outcome       string
	}{{impatient, 409, 423, "held"}, {full, 409, 423, "full"}, {waits, 409, 503, "timeout"}} {
		wantRetryAfter(t, deliver(t, c.caddy.url+"/shop", "x", c.status, c.outcome))
		wantRetryAfter(t, deliver(t, c.caddy.url+"/shop", "y", c.other, c.outcome))
		wantRetryAfter(t, deliver(t, c.caddy.url+"/shop", "", c.other, c.outcome))
	}
	up.letGo()
	wantStatus(t, <-first, 200)
	deliver(t, waits.url+"/shop", "x", 200, "duplicate")
	deliver(t, waits.url+"/shop", "y", 200, "acquired")
}

// The same delivery in line, at another Caddy or the same: it runs if the one before it failed.
func TestDeliveryWaitsForItself(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for _, status := range []int{200, 500} {
		up := startUpstream(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) })
		site := deduped(up, "wait 1m")
		here, there := startCaddy(t, onRedis(server), site), startCaddy(t, onRedis(server), site)
		path := fmt.Sprint("/", status)
		first := up.occupy(t, here.url+path, "X-Id", "x")
		var again []<-chan answer
		for i, c := range []*caddy{here, there, here, there} {
			again = append(again, inFlight(t, c.url+path, "X-Id", "x"))
			await(t, "it to stand in line", func() bool { return inLine(t, server, path) == i+1 })
		}
		up.letGo()
		wantStatus(t, <-first, status)
		for _, a := range again {
			wantStatus(t, <-a, status)
		}
		if begun, _, _ := up.count(); begun == 1 != (status == 200) {
			t.Errorf("status %d: reached the app %d times", status, begun)
		}
		if n := up.overlap(); n != 1 {
			t.Errorf("%d at the same time", n)
		}
	}
}

// A sender that did not wait for the answer sends it again.
func TestDeliveryWhoseSenderHungUp(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for mode, want := range map[string]string{"finish": "duplicate", "cancel": "acquired"} {
		up := startUpstream(t, nil)
		c := startCaddy(t, onRedis(server), deduped(up, "wait 1m", "on_disconnect "+mode))
		up.holdAll()
		ctx, hangUp := context.WithCancel(t.Context())
		gone := make(chan answer)
		go func() { gone <- do(ctx, newClient(t), http.MethodPost, c.url+"/"+mode, "", "X-Id", "x") }()
		await(t, "the delivery to run", func() bool { return up.runs() == 1 })
		hangUp()
		<-gone
		if mode == "cancel" {
			await(t, "the delivery to be cancelled", func() bool { _, _, cancelled := up.count(); return cancelled == 1 })
		}
		up.letGo()
		deliver(t, c.url+"/"+mode, "x", 200, want)
	}
}

// The lock is lost while the app works. What it has handled all the same is not handled again.
func TestDeliveryWhoseLockIsLost(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for mode, again := range map[string]string{"continue": "duplicate", "cancel": "acquired"} {
		up := startUpstream(t, nil)
		c := startCaddy(t, onRedis(server, "lease 1s"), deduped(up, "wait 1m", "on_lost "+mode))
		first := up.occupy(t, c.url+"/"+mode, "X-Id", "x")
		server.Client.Del(t.Context(), "lock./"+mode, "{lock./"+mode+"}:holder")
		c.awaitLog(t, "the lock is lost")
		if mode == "cancel" {
			wantStatus(t, <-first, 503)
		}
		up.letGo()
		if mode == "continue" {
			wantStatus(t, <-first, 200)
		}
		deliver(t, c.url+"/"+mode, "x", 200, again)
	}
}

// A Caddy dies half way: the delivery is sent again, and handled then.
func TestDeliveryWhoseCaddyDies(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	site := deduped(up, "wait 1m")
	dies, survives := startCaddy(t, onRedis(server, "lease 1s"), site), startCaddy(t, onRedis(server, "lease 1s"), site)
	up.occupy(t, dies.url+"/shop", "X-Id", "x")
	again := inFlight(t, survives.url+"/shop", "X-Id", "x")
	await(t, "it to stand in line", func() bool { return inLine(t, server, "/shop") == 1 })
	dies.kill()
	await(t, "it to run again", func() bool { begun, _, _ := up.count(); return begun == 2 })
	up.letGo()
	wantStatus(t, <-again, 200)
	deliver(t, survives.url+"/shop", "x", 200, "duplicate")
	if begun, _, _ := up.count(); begun != 2 {
		t.Errorf("reached the app %d times, want 2", begun)
	}
}

// While Redis is away nobody knows what was handled.
func TestDeliveryWhileRedisIsAway(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	rejects := startCaddy(t, onRedis(server), deduped(up))
	passes := startCaddy(t, onRedis(server), deduped(up, "on_redis_error pass"))
	deliver(t, rejects.url+"/shop", "x", 200, "acquired")
	server.Kill()
	deliver(t, rejects.url+"/shop", "x", 503, "error")
	deliver(t, passes.url+"/shop", "x", 200, "passed")
}

// In memory, deliveries survive a reload.
func TestDeliverySurvivesReload(t *testing.T) {
	t.Parallel()
	up := startUpstream(t, nil)
	c := startCaddy(t, "redis_lock {\nmemory\ndedupe {header.X-Id}\n}", "redis_lock {path}\n"+up.proxy())
	post(t, c.url, 200, "X-Id", "x")
	c.reload(t, c.config("redis_lock {\nmemory\n}", deduped(up)))
	deliver(t, c.url, "x", 200, "duplicate")
}

func TestReadmeDeliveries(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var got string
	up := startUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = string(body)
	})
	c := startExample(t, "dedupe", onRedis(server), up.addr())
	push := `{"ref": "refs/heads/main", "repository": {"full_name": "acme/shop"}}`
	for range 2 {
		wantStatus(t, do(t.Context(), newClient(t), http.MethodPost, c.url, push, "X-GitHub-Delivery", "72d3162e"), 200)
	}
	if begun, _, _ := up.count(); begun != 1 || got != push {
		t.Errorf("reached the app %d times, as %s", begun, got)
	}
}
