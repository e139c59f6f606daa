package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

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
