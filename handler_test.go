package redislock

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// newHandler provisions h, with its locks in memory.
func newHandler(t *testing.T, h *Handler) *Handler {
	t.Helper()
	h.Memory = true
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	if err := h.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	if err := h.Validate(); err != nil {
		t.Fatal(err)
	}
	return h
}

// newRequest is a request as Caddy's server prepares it.
func newRequest(method, target string) (*http.Request, *httptest.ResponseRecorder) {
	w := httptest.NewRecorder()
	return caddyhttp.PrepareRequest(httptest.NewRequest(method, target, nil), caddy.NewReplacer(), w, nil), w
}

func TestRequestWithoutLockAllocatesNothing(t *testing.T) {
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
	for _, methods := range [][]string{nil, {unsafe}} {
		h := newHandler(t, &Handler{Methods: methods})
		r, w := newRequest(http.MethodGet, "/")
		if n := testing.AllocsPerRun(100, func() { _ = h.ServeHTTP(w, r, next) }); n != 0 {
			t.Errorf("methods %v: %v allocations", methods, n)
		}
	}
}

func TestNeedsLock(t *testing.T) {
	webSocket := func(r *http.Request) {
		r.Header.Set("Connection", "keep-alive, Upgrade")
		r.Header.Set("Upgrade", "websocket")
	}
	for _, c := range []struct {
		methods []string
		method  string
		change  func(*http.Request)
		want    bool
	}{
		{nil, "POST", nil, true},
		{nil, "PUT", nil, true},
		{nil, "PATCH", nil, true},
		{nil, "DELETE", nil, true},
		{nil, "GET", nil, false},
		{nil, "LOCK", nil, false},
		{nil, "POST", webSocket, true},
		{[]string{"LOCK"}, "LOCK", nil, true},
		{[]string{"LOCK"}, "POST", nil, false},
		{[]string{"GET"}, "GET", nil, true},
		{[]string{"GET"}, "GET", webSocket, false},
		{[]string{"GET"}, "GET", func(r *http.Request) { r.Header.Set("Upgrade", "websocket") }, true},
		{[]string{"GET"}, "GET", func(r *http.Request) { webSocket(r); r.Header.Set("Upgrade", "h2c") }, true},
		{[]string{unsafe}, "LOCK", nil, true},
		{[]string{unsafe}, "GET", nil, false},
		{[]string{unsafe}, "HEAD", nil, false},
		{[]string{unsafe}, "OPTIONS", nil, false},
		{[]string{unsafe}, "TRACE", nil, false},
		{[]string{unsafe}, "PROPFIND", nil, false},
		{[]string{unsafe}, "REPORT", nil, false},
		{[]string{unsafe}, "SEARCH", nil, false},
		{[]string{unsafe}, "QUERY", nil, false},
		{[]string{unsafe}, "CONNECT", nil, true},
		{[]string{unsafe}, "CONNECT", func(r *http.Request) { r.ProtoMajor = 2; r.Header[":protocol"] = []string{"websocket"} }, false},
		{[]string{unsafe}, "CONNECT", func(r *http.Request) { r.ProtoMajor = 1; r.Header[":protocol"] = []string{"websocket"} }, true},
		{[]string{unsafe}, "CONNECT", func(r *http.Request) { r.ProtoMajor = 3; r.Proto = "websocket" }, false},
	} {
		r, _ := newRequest(c.method, "http://example.com/")
		if c.change != nil {
			c.change(r)
		}
		if got := newHandler(t, &Handler{Methods: c.methods}).needsLock(r); got != c.want {
			t.Errorf("methods %v, %s with %v: needs lock %v, want %v", c.methods, c.method, r.Header, got, c.want)
		}
	}
}

func TestLostLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHandler(t, &Handler{Name: []string{"lost"}})
		r, w := newRequest(http.MethodPost, "/")
		err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			<-r.Context().Done()
			if cause := context.Cause(r.Context()); !errors.Is(cause, lock.ErrLost) {
				t.Errorf("the request ended by %v, want the lost lock", cause)
			}
			return caddyhttp.Error(http.StatusBadGateway, context.Cause(r.Context()))
		}))
		herr, ok := err.(caddyhttp.HandlerError)
		if !ok || herr.StatusCode != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" {
			t.Errorf("error %v, header %v; want 503 with Retry-After", err, w.Header())
		}
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		if outcome, _ := repl.GetString("http.redis_lock.outcome"); outcome != outcomeLost {
			t.Errorf("outcome %q, want lost", outcome)
		}
	})
}

// The lock is held while the next handler runs, and free when the request has returned,
// whatever the next handler does.
func TestReleased(t *testing.T) {
	h := newHandler(t, &Handler{Name: []string{"released"}})
	locked := func() bool {
		r, w := newRequest(http.MethodPost, "/")
		ran := false
		err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			ran = true
			return nil
		}))
		herr, refused := err.(caddyhttp.HandlerError)
		if refused && herr.StatusCode != http.StatusLocked || ran == refused {
			t.Fatalf("error %v, ran %v", err, ran)
		}
		return refused
	}
	for name, end := range map[string]func() error{
		"success": func() error { return nil },
		"error":   func() error { return caddyhttp.Error(500, errors.New("failed")) },
		"panic":   func() error { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			func() {
				defer func() {
					if recover() != nil != (name == "panic") {
						t.Error("the panic did not go through")
					}
				}()
				r, w := newRequest(http.MethodPost, "/")
				_ = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
					if !locked() {
						t.Error("not locked while the request runs")
					}
					return end()
				}))
			}()
			if locked() {
				t.Error("still locked after the request")
			}
		})
	}
}
