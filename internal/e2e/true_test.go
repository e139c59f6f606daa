package e2e

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

func noKeys(t *testing.T, server *redistest.Server) {
	t.Helper()
	await(t, "no key to be left", func() bool { return len(server.Client.Keys(t.Context(), "lock.*").Val()) == 0 })
}

// A client that has its complete answer never meets its own lock, whatever the answer's size and
// form, with each request on a connection of its own.
func TestAnswerEndsAfterRelease(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		size, _ := strconv.Atoi(r.URL.Query().Get("size"))
		if r.URL.Query().Has("chunked") {
			w.(http.Flusher).Flush()
		} else {
			w.Header().Set("Content-Length", strconv.Itoa(size))
		}
		if size == 0 && r.URL.Query().Has("204") {
			w.Header().Del("Content-Length")
			w.WriteHeader(204)
		}
		_, _ = w.Write(make([]byte, size))
	})
	c := startCaddy(t, onRedis(server), "redis_lock {path}\n"+up.proxy())
	for i, query := range []string{"size=0", "size=0&204", "size=1", "size=2000", "size=5000", "size=65536", "size=3000000", "size=65536&chunked"} {
		for n := range 60 {
			client := newClient(t)
			a := do(t.Context(), client, http.MethodPost, fmt.Sprintf("%s/%d?%s", c.url, i, query), "")
			client.CloseIdleConnections()
			if a.err != nil || a.StatusCode >= 300 {
				t.Fatalf("%s, request %d: %+v", query, n, a)
			}
		}
	}
}

// The sender gives up and tries again, ten times, while the app works on the first: the app sees
// them one after the other.
func TestRetriesDoNotOverlap(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock deploy\n"+up.proxy())
	up.holdAll()
	for try := range 10 {
		ctx, giveUp := context.WithCancel(t.Context())
		sent := make(chan answer)
		go func() { sent <- do(ctx, newClient(t), http.MethodPost, c.url, `{"try": true}`) }()
		if try == 0 {
			await(t, "the first to run", func() bool { return up.runs() == 1 })
			giveUp()
			<-sent
		} else {
			wantStatus(t, <-sent, 423)
			giveUp()
		}
	}
	if begun, ended, _ := up.count(); begun != 1 || ended != 0 {
		t.Errorf("%d began, %d ended; want the first one alone, still running", begun, ended)
	}
	up.letGo()
	noKeys(t, server)
	if _, _, cancelled := up.count(); cancelled != 0 {
		t.Error("the hang-up cancelled the app's work")
	}
	await(t, "the next one to be served", func() bool { // nobody is there to hear of the release
		return do(t.Context(), newClient(t), http.MethodPost, c.url, "").StatusCode == 200
	})
}

// streaming sends a line each time it is told to.
func streaming(lines <-chan string, ended chan<- error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for line := range lines {
			if _, err := fmt.Fprintln(w, line); err != nil {
				ended <- err
				return
			}
			w.(http.Flusher).Flush()
		}
		ended <- r.Context().Err()
	}
}

// The client is gone after the first line of a streaming answer: it is read to its end, with the
// lock held. With `on_disconnect cancel` it ends at once.
func TestStreamingAnswerIsReadToItsEnd(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"finish", "cancel"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			lines, ended := make(chan string), make(chan error, 1)
			up := startUpstream(t, streaming(lines, ended))
			c := startCaddy(t, onRedis(server, "on_disconnect "+mode), "redis_lock deploy\n"+up.proxy())
			ctx, hangUp := context.WithCancel(t.Context())
			request, _ := http.NewRequestWithContext(ctx, http.MethodPost, c.url, strings.NewReader("{}"))
			gotLine := make(chan string)
			go func() {
				response, err := newClient(t).Do(request)
				if err != nil {
					t.Error(err)
					close(gotLine)
					return
				}
				defer response.Body.Close()
				line, _ := bufio.NewReader(response.Body).ReadString('\n')
				gotLine <- line
				<-ctx.Done()
			}()
			lines <- "first"
			if line := <-gotLine; line != "first\n" {
				t.Errorf("first line %q: streaming is not flushed as it comes", line)
			}
			hangUp()
			if mode == "cancel" {
				if err := func() error {
					for {
						select {
						case err := <-ended:
							return err
						case lines <- strings.Repeat("x", 10_000):
						}
					}
				}(); err == nil {
					t.Error("the app was not cancelled")
				}
			} else {
				for range 200 { // more than all buffers on the way hold
					lines <- strings.Repeat("x", 10_000)
				}
				post(t, c.url, 423)
				close(lines)
				if err := <-ended; err != nil {
					t.Errorf("the app's answer was cut off: %v", err)
				}
			}
			noKeys(t, server)
			c.awaitQuiet(t)
		})
	}
}

func TestHangUpOverHTTP2(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startTLS(t, onRedis(server), "redis_lock deploy\n"+up.proxy())
	client := newClient(t)
	client.Transport.(*http.Transport).ForceAttemptHTTP2 = true
	await(t, "the certificate", func() bool {
		a := do(t.Context(), client, http.MethodGet, c.url, "")
		return a.err == nil && a.ProtoMajor == 2
	})
	up.hangUp(t, client, c.url)
	wantStatus(t, do(t.Context(), client, http.MethodPost, c.url, ""), 423)
	up.letGo()
	noKeys(t, server)
	if _, _, cancelled := up.count(); cancelled != 0 {
		t.Error("the hang-up cancelled the app's work")
	}
}

// A Caddy dies with the lock: nobody starts before the second in the key, the next one soon after.
func TestCrashOfHolder(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	site := "redis_lock deploy\n" + up.proxy()
	dying := startCaddy(t, onRedis(server, "lease 2s"), site)
	survivor := startCaddy(t, onRedis(server, "lease 2s", "wait 1m"), site)
	up.occupy(t, dying.url)
	dying.kill()
	await(t, "the app to notice", func() bool { return up.runs() == 0 })
	end, err := server.Client.Get(t.Context(), "lock.deploy").Int64()
	if err != nil {
		t.Fatal(err)
	}
	next := inFlight(t, survivor.url)
	await(t, "the next to run", func() bool { return up.runs() == 1 })
	now := server.Now(t)
	if !now.After(time.Unix(end, 0)) {
		t.Errorf("the next one started at %v, before %v", now, time.Unix(end, 0))
	}
	if late := now.Sub(time.Unix(end, 0)); late > 2500*time.Millisecond+5*time.Second { // noisy machines
		t.Errorf("the next one started %v after the lock had run out", late)
	}
	up.letGo()
	wantStatus(t, <-next, 200)
	noKeys(t, server)
}

// A Caddy is stopped past its lease and goes on: its request is over, and it does not touch the
// lock of the one that came after it.
func TestStoppedHolderLeavesSuccessorAlone(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up, upNext := startUpstream(t, nil), startUpstream(t, nil)
	stopped := startCaddy(t, onRedis(server, "lease 1s"), "redis_lock deploy\n"+up.proxy())
	other := startCaddy(t, onRedis(server, "lease 10s", "wait 1m"), "redis_lock deploy\n"+upNext.proxy())
	up.holdAll()
	upNext.holdAll()
	first := inFlight(t, stopped.url)
	await(t, "the first to run", func() bool { return up.runs() == 1 })
	stopped.stop()
	second := inFlight(t, other.url)
	await(t, "the second to run", func() bool { return upNext.runs() == 1 })
	stopped.cont()
	wantStatus(t, <-first, 503)
	stopped.awaitQuiet(t)
	post(t, stopped.url, 423)
	if server.Client.Exists(t.Context(), "lock.deploy").Val() != 1 {
		t.Error("the successor's lock is gone")
	}
	upNext.letGo()
	wantStatus(t, <-second, 200)
	noKeys(t, server)
}

// Redis hangs for longer than the lease: the app is cancelled before anybody else can have the
// lock, and nobody is stuck afterwards. The upstream is not taken out of rotation for it.
func TestRedisHangsBeyondLease(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "lease 2s"), "redis_lock deploy\n"+
		"reverse_proxy "+up.addr()+" {\nfail_duration 1m\n}"+outcomePage)
	first := up.occupy(t, c.url)
	server.Pause()
	await(t, "the app to be cancelled", func() bool { _, _, cancelled := up.count(); return cancelled == 1 })
	server.Resume() // whoever asks now asks after that
	a := <-first
	wantStatus(t, a, 503)
	wantRetryAfter(t, a)
	if !strings.HasPrefix(a.body, "lost ") {
		t.Errorf("page %q, want outcome lost", a.body)
	}
	up.letGo()
	await(t, "requests to be served again", func() bool {
		return do(t.Context(), newClient(t), http.MethodPost, c.url, "").StatusCode == 200
	})
	if most := up.overlap(); most != 1 {
		t.Errorf("%d at the same time", most)
	}
	noKeys(t, server)
	c.awaitQuiet(t)
}

// A foreign hand at the key while a request runs: it is cancelled, and nobody else is let in
// before that.
func TestForeignHandWhileHeld(t *testing.T) {
	t.Parallel()
	for name, meddle := range map[string]func(*redistest.Server){
		"delete":    func(s *redistest.Server) { s.Client.Del(context.Background(), "lock.deploy") },
		"overwrite": func(s *redistest.Server) { s.Client.Set(context.Background(), "lock.deploy", "1", 0) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			up := startUpstream(t, nil)
			site := "redis_lock deploy\n" + up.proxy()
			holder := startCaddy(t, onRedis(server, "lease 3s"), site)
			other := startCaddy(t, onRedis(server, "lease 30s", "wait 1m"), site)
			first := up.occupy(t, holder.url)
			meddle(server)
			second := inFlight(t, other.url)
			wantStatus(t, <-first, 503)
			await(t, "the app to be cancelled", func() bool { _, _, cancelled := up.count(); return cancelled == 1 })
			up.letGo()
			wantStatus(t, <-second, 200)
			if most := up.overlap(); most != 1 {
				t.Errorf("%d at the same time", most)
			}
		})
	}
}

// 500 requests over 200 names at two Caddys with different leases, with clients that leave at
// any moment: nothing overlaps, and nothing is left.
func TestRandomAborts(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(rand.N(20 * time.Millisecond))
		_, _ = w.Write(make([]byte, rand.N(100_000)))
	})
	site := "redis_lock {header.X-Name}\n" + up.proxy()
	caddys := []*caddy{
		startCaddy(t, onRedis(server, "lease 1s", "wait 5s"), site),
		startCaddy(t, onRedis(server, "lease 3s", "wait 5s"), site),
	}
	requests := make(chan int)
	var clients sync.WaitGroup
	for range 25 {
		clients.Go(func() {
			client := newClient(t)
			for i := range requests {
				ctx, hangUp := context.WithTimeout(t.Context(), rand.N(60*time.Millisecond))
				do(ctx, client, http.MethodPost, caddys[i%2].url, strings.Repeat("x", rand.N(10_000)), "X-Name", strconv.Itoa(rand.N(200)))
				hangUp()
			}
		})
	}
	for i := range 500 {
		requests <- i
	}
	close(requests)
	clients.Wait()
	noKeys(t, server)
	for _, c := range caddys {
		c.awaitQuiet(t)
	}
	if most := up.overlap(); most != 1 {
		t.Errorf("%d of one name at the same time", most)
	}
}

// Fences grow with every lock of a name, over all Caddys.
func TestFences(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	site := "redis_lock deploy\n" + up.proxy()
	caddys := []*caddy{
		startCaddy(t, onRedis(server, "fence_header x-fence"), site),
		startCaddy(t, onRedis(server, "fence_header X-Fence"), site),
	}
	for i := range 20 {
		post(t, caddys[i%2].url, 200, "X-Fence", "9999999999999999", "Connection", "keep-alive, x-fence, X-Other")
	}
	var last int64
	for _, text := range up.fences {
		fence, err := strconv.ParseInt(text, 10, 64)
		if err != nil || fence <= last || fence == 9999999999999999 {
			t.Fatalf("fences %v: not growing numbers of ours", up.fences)
		}
		last = fence
	}
	wantStatus(t, do(t.Context(), newClient(t), http.MethodGet, caddys[0].url, "", "X-Fence", "1"), 200)
	if fence := up.fences[len(up.fences)-1]; fence != "" {
		t.Errorf("a GET reached the app with the fence %q", fence)
	}
	if slices.Contains(up.fences, "9999999999999999") {
		t.Error("a client's fence reached the app")
	}
}
