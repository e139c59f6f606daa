package e2e

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

func wantRetryAfter(t *testing.T, a answer) {
	t.Helper()
	if seconds, err := strconv.Atoi(a.Header.Get("Retry-After")); err != nil || seconds < 1 {
		t.Errorf("Retry-After %q, want whole seconds of at least 1", a.Header.Get("Retry-After"))
	}
}

func TestContention(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), `redis_lock /strange secret-name {
		status 503
	}
	redis_lock / secret-name
	`+up.proxy()+`
	handle_errors {
		header X-Page yes
		respond "{http.redis_lock.outcome}|{http.redis_lock.name}|{http.redis_lock.retry_after}|{http.redis_lock.fence}|{err.message}"
	}`)
	first := up.occupy(t, c.url)

	a := post(t, c.url, 423)
	wantRetryAfter(t, a)
	if a.body != "held|secret-name|1||lock is held" || a.Header.Get("X-Page") != "yes" {
		t.Errorf("page %q", a.body)
	}
	a = post(t, c.url+"/strange", 503)
	wantRetryAfter(t, a)
	if !strings.HasPrefix(a.body, "held|") {
		t.Errorf("contention with another status: page %q", a.body)
	}
	up.letGo()
	wantStatus(t, <-first, 200)
}

func TestRedisDown(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	server.Kill()
	up := startUpstream(t, nil)
	c := newCaddy(t)
	config := c.config(onRedis(server), `redis_lock /pass secret-name {
		on_redis_error pass
		wait 1m
	}
	redis_lock / secret-name
	`+up.proxy()+outcomePage)
	if code, output := exitCode(t, c.command("validate", "--adapter", "caddyfile", "--config", c.write(t, config))); code != 0 {
		t.Fatalf("caddy validate while Redis is down:\n%s", output)
	}
	c.start(t, config)

	a := post(t, c.url, 503)
	wantRetryAfter(t, a)
	if !strings.HasPrefix(a.body, "error secret-name 1 503 redis is unavailable") {
		t.Errorf("page %q", a.body)
	}
	c.awaitLog(t, "connection refused")
	wantStatus(t, do(t.Context(), newClient(t), http.MethodGet, c.url, ""), 200)

	// Let by without Redis, but still one at a time on this Caddy.
	first := up.occupy(t, c.url+"/pass")
	second := inFlight(t, c.url+"/pass")
	a = post(t, c.url, 423) // held by this very Caddy: contention, whatever Redis does
	if !strings.HasPrefix(a.body, "held ") {
		t.Errorf("page %q", a.body)
	}
	up.letGo()
	wantStatus(t, <-first, 200)
	wantStatus(t, <-second, 200)
	if most := up.overlap(); most != 1 {
		t.Errorf("%d requests of one name ran at the same time on one Caddy", most)
	}

	server.Restart(t)
	post(t, c.url, 200)
}

// Redis hangs: it accepts connections and answers nothing.
func TestRedisHangs(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock deploy\n"+up.proxy()+outcomePage)
	post(t, c.url, 200)
	server.Pause()
	a := post(t, c.url, 503)
	wantRetryAfter(t, a)
	if !strings.HasPrefix(a.body, "error ") {
		t.Errorf("page %q", a.body)
	}
	server.Resume()
	// What was asked meanwhile may have been granted after all: it is no contention for us.
	await(t, "requests to be served again", func() bool {
		a := do(t.Context(), newClient(t), http.MethodPost, c.url, "")
		if a.err != nil || a.StatusCode == 423 {
			t.Fatalf("after the hang: %+v", a)
		}
		return a.StatusCode == 200
	})
	await(t, "nothing to be left behind", func() bool {
		return server.Client.Exists(t.Context(), "lock.deploy").Val() == 0
	})
}

func TestWrongConfigurationIsRefused(t *testing.T) {
	t.Parallel()
	c := newCaddy(t)
	path := c.write(t, c.config("redis_lock {\nlease 30\n}", "respond ok"))
	code, output := exitCode(t, c.command("adapt", "--adapter", "caddyfile", "--config", path))
	if code == 0 || !strings.Contains(output, "Caddyfile:5") || !strings.Contains(output, "lease: ") {
		t.Errorf("exit code %d, output %s", code, output)
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := startCaddy(t, onRedis(server), `
	request_body /body {
		max_size 10
	}
	redis_lock /reject {header.X-Name}
	redis_lock /pass {header.X-Name} {
		on_no_name pass
	}
	redis_lock /first {
		name {header.X-Name} repo:{query.repo} fixed
	}
	redis_lock /body {http.request.body}
	redis_lock /default*
	respond "[{http.redis_lock.name}] {http.redis_lock.outcome} {http.redis_lock.fence}"
	`+outcomePage)
	for _, x := range []struct {
		path   string
		status int
		page   string
		header []string
	}{
		{"/reject", 400, "no_name  ", nil},
		{"/reject", 400, "no_name  ", []string{"X-Name", ""}},
		{"/reject", 200, "[a {b} c] acquired ", []string{"X-Name", "a {b} c"}},
		{"/pass", 200, "[] passed ", nil},
		{"/pass", 200, "[x] acquired ", []string{"X-Name", "x"}},
		{"/first?repo=r", 200, "[x] acquired", []string{"X-Name", "x"}},
		{"/first?repo=r", 200, "[repo:r] acquired", nil},
		{"/first?repo=", 200, "[fixed] acquired", nil},
		{"/first", 200, "[fixed] acquired", nil},
	} {
		a := post(t, c.url+x.path, x.status, x.header...)
		if !strings.HasPrefix(a.body, x.page) {
			t.Errorf("%s %v: page %q, want %q", x.path, x.header, a.body, x.page)
		}
	}
	host, _, _ := strings.Cut(c.addr, ":")
	if a := post(t, c.url+"/default/x", 200); !strings.HasPrefix(a.body, "["+host+"/default/x] ") {
		t.Errorf("default name: page %q", a.body)
	}
	// A name out of the body, and one out of a body that is too large.
	a := do(t.Context(), newClient(t), http.MethodPost, c.url+"/body", "short")
	if a.StatusCode != 200 || !strings.HasPrefix(a.body, "[short] acquired") {
		t.Errorf("short body: %d %q", a.StatusCode, a.body)
	}
	a = do(t.Context(), newClient(t), http.MethodPost, c.url+"/body", strings.Repeat("long", 10))
	if a.StatusCode != 413 {
		t.Errorf("body beyond max_size: status %d, want 413; page %q", a.StatusCode, a.body)
	}
}

// Name, outcome and waiting time are fields of the access log.
func TestAccessLog(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "log\nredis_lock {path}\n"+up.proxy())
	first := up.occupy(t, c.url+"/hook")
	post(t, c.url+"/hook", 423)
	up.letGo()
	wantStatus(t, <-first, 200)
	type entry struct {
		Logger  string
		Status  int
		Name    string  `json:"redis_lock_name"`
		Outcome string  `json:"redis_lock_outcome"`
		Waited  float64 `json:"redis_lock_waited"`
	}
	entries := make(map[int]entry)
	await(t, "both in the access log", func() bool {
		for line := range strings.Lines(c.log.String()) {
			var e entry
			if json.Unmarshal([]byte(line), &e) == nil && strings.HasPrefix(e.Logger, "http.log.access") {
				entries[e.Status] = e
			}
		}
		return len(entries) == 2
	})
	if e := entries[200]; e.Name != "/hook" || e.Outcome != "acquired" || e.Waited <= 0 {
		t.Errorf("served: %+v", e)
	}
	if e := entries[423]; e.Name != "/hook" || e.Outcome != "held" {
		t.Errorf("refused: %+v", e)
	}
}

// A foreign value in the key is contention, with one warning for the person who can mend it.
func TestForeignValueIsLoggedOnce(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock deploy\n"+up.proxy())
	server.Client.Set(t.Context(), "lock.deploy", "mine", 0)
	for range 5 {
		wantRetryAfter(t, post(t, c.url, 423))
	}
	c.awaitLog(t, `"msg":"the lock's key`)
	if n := strings.Count(c.log.String(), `"msg":"the lock's key contains something that is not a lock"`); n != 1 {
		t.Errorf("%d warnings, want one", n)
	}
}

// A key that cannot be used, or may not, is no outage of Redis.
func TestRefusedKeyIsLoggedOnce(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	server.AddUser(t, "locker", "~lock.*", "~{lock.*", "allchannels", "+@all")
	server.Client.Set(t.Context(), "{lock./bad}:holder", "x", 0)
	for prefix, remedy := range map[string]string{"lock.": "delete it", "other.": "the user lacks a right"} {
		up := startUpstream(t, nil)
		c := startCaddy(t, "redis_lock {\nredis redis://locker:pass@"+server.Addr+"\n}",
			"redis_lock {path} {\nprefix "+prefix+"\n}\n"+up.proxy())
		for range 3 {
			wantRetryAfter(t, post(t, c.url+"/bad", 503))
		}
		c.awaitLog(t, `"msg":"redis refuses a lock","name":"/bad"`)
		log := c.log.String()
		if n := strings.Count(log, "redis refuses a lock"); n != 1 || !strings.Contains(log, remedy) || strings.Contains(log, `"msg":"redis is unavailable"`) {
			t.Errorf("%s: %d entries about the key, want one with the remedy %q, and none about an outage", prefix, n, remedy)
		}
	}
}

// Only WebSocket handshakes go by the lock: no other header is a way around it.
func TestUpgradeIsNoWayAround(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "methods unsafe"), "redis_lock deploy\n"+up.proxy())
	first := up.occupy(t, c.url)
	post(t, c.url, 423, "Connection", "Upgrade", "Upgrade", "websocket")
	up.letGo()
	wantStatus(t, <-first, 200)
}
