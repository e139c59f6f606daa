package e2e

import (
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// connections returns how many connections Caddys have to the server.
func connections(t *testing.T, server *redistest.Server) int {
	t.Helper()
	list, err := server.Client.ClientList(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(list, "\n") - 1 // but for the test's own
}

// A reload that changes the lease, the Redis, or both, while requests run and wait: all of them
// are served one at a time, and nothing of the old configuration is left.
func TestReload(t *testing.T) {
	t.Parallel()
	server, otherServer := redistest.Start(t), redistest.Start(t)
	up := startUpstream(t, nil)
	site := "redis_lock /hook deploy\n" + up.proxy() + probes(3)
	c := startCaddy(t, onRedis(server, "wait 1m"), site)
	up.holdAll()
	answers := []<-chan answer{inFlight(t, c.url+"/hook")}
	await(t, "the first to run", func() bool { return up.runs() == 1 })
	for n := 1; n <= 2; n++ {
		answers = append(answers, inFlight(t, c.url+"/hook"))
		awaitWaiting(t, c, n)
	}
	c.reload(t, c.config(onRedis(server, "wait 1m", "lease 5s"), site))
	answers = append(answers, inFlight(t, c.url+"/hook"))
	awaitWaiting(t, c, 3) // one line, whatever the configuration
	c.reload(t, c.config(onRedis(otherServer, "wait 1m"), site))
	up.letGo()
	for _, a := range answers {
		wantStatus(t, <-a, 200)
	}
	if most := up.overlap(); most != 1 {
		t.Errorf("%d at the same time", most)
	}
	post(t, c.url+"/hook", 200)
	noKeys(t, server)
	noKeys(t, otherServer)
	await(t, "no connection to the old Redis", func() bool { return connections(t, server) == 0 })
	if connections(t, otherServer) == 0 {
		t.Error("no connection to the new Redis: this test sees nothing")
	}
	c.reload(t, c.config("", "respond ok"))
	await(t, "no connection to the new Redis", func() bool { return connections(t, otherServer) == 0 })
	c.awaitQuiet(t)
}

// A shutdown lets the requests that run and wait come to their end.
func TestShutdown(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, "grace_period 30s\n"+onRedis(server, "wait 1m"), "redis_lock /hook deploy\n"+up.proxy()+probes(1))
	first := up.occupy(t, c.url+"/hook")
	second := inFlight(t, c.url+"/hook")
	awaitWaiting(t, c, 1)
	c.terminate()
	await(t, "caddy to stop listening", func() bool {
		conn, err := net.Dial("tcp", c.addr)
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	up.letGo()
	wantStatus(t, <-first, 200)
	wantStatus(t, <-second, 200)
	<-c.ended
	noKeys(t, server)
}

// An outage is logged once, and its end as well, however many requests it costs.
func TestOutageIsLoggedOnce(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock {header.X-Name}\n"+up.proxy())
	server.Kill()
	for range 10 {
		wantRetryAfter(t, post(t, c.url, 503, "X-Name", "a"))
	}
	server.Restart(t)
	post(t, c.url, 200, "X-Name", "a")
	c.awaitLog(t, "redis is available again")
	log := c.log.String()
	if n := strings.Count(log, `"msg":"redis is unavailable"`); n != 1 {
		t.Errorf("the outage was logged %d times", n)
	}
	if n := strings.Count(log, `"msg":"redis is available again"`); n != 1 {
		t.Errorf("the recovery was logged %d times", n)
	}
	if strings.Contains(log, "connection pool") {
		t.Error("go-redis logs on its own")
	}
}

// While Redis hangs, every request is answered within one time-out of its arrival, and not one
// after another's.
func TestHangIsSharedByAll(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "wait 1m"), "redis_lock {header.X-Name}\n"+up.proxy())
	post(t, c.url, 200, "X-Name", "warm")
	server.Pause()
	defer server.Resume()
	begin := time.Now()
	for range 2 { // the second round meets a known outage
		var clients sync.WaitGroup
		for i := range 40 {
			clients.Go(func() {
				a := do(t.Context(), newClient(t), http.MethodPost, c.url, "", "X-Name", string(rune('a'+i%20)))
				if a.err != nil || a.StatusCode != 503 {
					t.Errorf("while Redis hangs: %+v", a)
				}
			})
		}
		clients.Wait()
	}
	// One after another it would be 40 time-outs in a row, or the whole wait.
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("two rounds of requests took %v", took)
	}
}

// What {env.*} resolved to is nowhere to be seen.
func TestSecretsStaySecret(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, "--requirepass", "geheim")
	up := startUpstream(t, nil)
	c := newCaddy(t)
	c.env = []string{"LOCKS=redis://:geheim@" + server.Addr}
	c.start(t, c.config("debug\nservers {\ntrace\n}\nredis_lock {\nredis {env.LOCKS}\n}", "redis_lock deploy\n"+up.proxy()+outcomePage))
	post(t, c.url, 200)
	server.Client.Do(t.Context(), "auth", "geheim")
	server.Client.ConfigSet(t.Context(), "requirepass", "another")
	config := do(t.Context(), newClient(t), http.MethodGet, "http://"+c.admin+"/config/", "")
	wantStatus(t, config, 200)
	if !json.Valid([]byte(config.body)) || !strings.Contains(config.body, "{env.LOCKS}") {
		t.Errorf("configuration: %s", config.body)
	}
	server.Kill()
	page := post(t, c.url, 503)
	for what, text := range map[string]string{"the log": c.log.String(), "the admin API": config.body, "the page": page.body} {
		if strings.Contains(text, "geheim") {
			t.Errorf("the password is in %s", what)
		}
	}
}

// The same name in the site and in a handle within is one lock; a proxy to another site of the
// same Caddy is not seen, and refused.
func TestReentrance(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), `redis_lock deploy
	handle /inner {
		redis_lock deploy
		redis_lock /inner other
		`+up.proxy()+`
	}
	`)
	post(t, c.url+"/inner", 200)
	if begun, _, _ := up.count(); begun != 1 {
		t.Errorf("%d requests reached the app", begun)
	}
	noKeys(t, server)
}

func TestHTTP3(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startTLS(t, onRedis(server), "redis_lock deploy\n"+up.proxy())
	transport := &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.Close()
	client := &http.Client{Transport: transport, Timeout: time.Minute}
	await(t, "HTTP/3", func() bool {
		a := do(t.Context(), client, http.MethodGet, c.url, "")
		return a.err == nil && a.ProtoMajor == 3
	})
	up.hangUp(t, client, c.url)
	a := do(t.Context(), client, http.MethodPost, c.url, "")
	wantStatus(t, a, 423)
	wantRetryAfter(t, a)
	up.letGo()
	noKeys(t, server)
	wantStatus(t, do(t.Context(), client, http.MethodPost, c.url, ""), 200)
}

// A connection that was upgraded belongs to its lock until it ends.
func TestUpgradedConnectionHoldsLock(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_ = rw.Flush()
		_, _ = io.Copy(conn, rw)
	})
	c := startCaddy(t, onRedis(server), "redis_lock deploy\n"+up.proxy())
	conn := dial(t, c, "POST / HTTP/1.1\nHost: "+c.addr+"\nContent-Length: 0\nConnection: Upgrade\nUpgrade: echo\n\nhello\n")
	got := make([]byte, 0, 500)
	await(t, "the echo", func() bool {
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		n, _ := conn.Read(got[len(got):cap(got)])
		got = got[:len(got)+n]
		return strings.HasPrefix(string(got), "HTTP/1.1 101") && strings.HasSuffix(string(got), "hello\r\n")
	})
	post(t, c.url, 423)
	conn.Close()
	await(t, "the lock to be free", func() bool {
		return do(t.Context(), newClient(t), http.MethodPost, c.url, "").StatusCode == 200
	})
	noKeys(t, server)
}
