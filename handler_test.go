package redislock

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

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

// neverRenewed is a Store whose renewals say that the lock is another's.
type neverRenewed struct{ lock.Store }

func (neverRenewed) Renew(context.Context, string, lock.Claim) (lock.Grant, error) {
	return lock.Grant{}, &lock.LostError{Why: lock.NotOwner}
}

type testBackend struct{ *lock.Locker }

func (b testBackend) use() (*lock.Locker, func(), error) { return b.Locker, func() {}, nil }
func (testBackend) close() error                         { return nil }

// What the client gets when the handlers' time with the lock is over before they are done.
func TestCutOff(t *testing.T) {
	until := func(ctx context.Context) { <-ctx.Done() }
	for _, c := range []struct {
		name    string
		handler Handler
		renewed bool
		next    func(w http.ResponseWriter, r *http.Request) error
		status  int // of the error; 0: none
		aborted bool
		body    string
		outcome string
	}{
		{name: "lost, an error", next: func(w http.ResponseWriter, r *http.Request) error {
			until(r.Context())
			return caddyhttp.Error(http.StatusBadGateway, r.Context().Err())
		}, status: 503, outcome: outcomeLost},
		{name: "lost, 499 like reverse_proxy", next: func(w http.ResponseWriter, r *http.Request) error {
			until(r.Context())
			w.WriteHeader(499)
			return nil
		}, status: 503, outcome: outcomeLost},
		{name: "lost, an answer that comes too late", next: func(w http.ResponseWriter, r *http.Request) error {
			until(r.Context())
			_, err := w.Write([]byte("late"))
			return err
		}, status: 503, outcome: outcomeLost},
		{name: "lost, nothing", next: func(w http.ResponseWriter, r *http.Request) error {
			until(r.Context())
			return nil
		}, status: 503, outcome: outcomeLost},
		{name: "lost, panic", next: func(w http.ResponseWriter, r *http.Request) error {
			until(r.Context())
			panic(http.ErrAbortHandler)
		}, status: 503, outcome: outcomeLost},
		{name: "lost, under way", next: func(w http.ResponseWriter, r *http.Request) error {
			_, _ = w.Write([]byte("first"))
			until(r.Context())
			_, err := w.Write([]byte("second"))
			return err
		}, aborted: true, body: "first", outcome: outcomeLost},
		{name: "lost, all of it is written", next: func(w http.ResponseWriter, r *http.Request) error {
			w.Header().Set("Content-Length", "3")
			_, _ = w.Write([]byte("all"))
			until(r.Context())
			return nil
		}, body: "all", outcome: outcomeLost},
		{name: "lost, answer without body", next: func(w http.ResponseWriter, r *http.Request) error {
			w.WriteHeader(204)
			until(r.Context())
			return nil
		}, outcome: outcomeLost},
		{name: "lost, goes on", handler: Handler{OnLost: continueRun}, next: func(w http.ResponseWriter, r *http.Request) error {
			time.Sleep(time.Minute)
			if err := r.Context().Err(); err != nil {
				t.Errorf("the request ended: %v", err)
			}
			_, err := w.Write([]byte("all"))
			return err
		}, body: "all", outcome: outcomeLost},
		{name: "lost, goes on until max_hold", handler: Handler{OnLost: continueRun}, next: func(w http.ResponseWriter, r *http.Request) error {
			until(r.Context())
			return nil
		}, status: 504, outcome: outcomeMaxHold},
		{name: "max_hold", renewed: true, next: func(w http.ResponseWriter, r *http.Request) error {
			until(r.Context())
			w.WriteHeader(499)
			return nil
		}, status: 504, outcome: outcomeMaxHold},
		{name: "max_hold, under way", renewed: true, next: func(w http.ResponseWriter, r *http.Request) error {
			w.Header().Set("Content-Length", "10")
			_, _ = w.Write([]byte("first"))
			until(r.Context())
			return nil
		}, aborted: true, body: "first", outcome: outcomeMaxHold},
		{name: "max_hold, ignored beyond the lease", renewed: true, next: func(w http.ResponseWriter, r *http.Request) error {
			time.Sleep(time.Hour)
			return nil
		}, status: 504, outcome: outcomeMaxHold},
		{name: "in time", renewed: true, next: func(w http.ResponseWriter, r *http.Request) error {
			time.Sleep(9 * time.Minute)
			_, err := w.Write([]byte("all"))
			return err
		}, body: "all", outcome: outcomeAcquired},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := lock.NewMemory()
				if !c.renewed {
					store = neverRenewed{store}
				}
				h := newHandler(t, &c.handler)
				h.backend = testBackend{lock.New(store, lock.Options{})}
				r, w := newRequest(http.MethodPost, "/")
				var err error
				aborted := func() (aborted bool) {
					defer func() { aborted = recover() == http.ErrAbortHandler }()
					err = h.ServeHTTP(w, r, caddyhttp.HandlerFunc(c.next))
					return false
				}()
				if aborted != c.aborted {
					t.Errorf("aborted %v, want %v", aborted, c.aborted)
				}
				herr, failed := err.(caddyhttp.HandlerError)
				if failed != (c.status != 0) || herr.StatusCode != c.status {
					t.Errorf("error %v, want status %d", err, c.status)
				}
				if retry := w.Header().Get("Retry-After"); (retry != "") != (c.status == 503) {
					t.Errorf("Retry-After %q", retry)
				}
				if body := w.Body.String(); body != c.body {
					t.Errorf("body %q, want %q", body, c.body)
				}
				repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
				if outcome, _ := repl.GetString("http.redis_lock.outcome"); outcome != c.outcome {
					t.Errorf("outcome %q, want %q", outcome, c.outcome)
				}
				if err := store.Inspect(t.Context(), "lock.example.com/", ""); err != nil {
					t.Errorf("not released: %v", err)
				}
			})
		})
	}
}

// A handler that does not return at max_hold keeps its lock for one more lease at most.
func TestMaxHoldIgnored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := lock.NewMemory()
		h := newHandler(t, &Handler{MaxHold: caddy.Duration(time.Minute)})
		h.backend = testBackend{lock.New(store, lock.Options{})}
		r, w := newRequest(http.MethodPost, "/")
		err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			time.Sleep(time.Minute)
			if store.Inspect(t.Context(), "lock.example.com/", "") == nil {
				t.Error("the lock is gone at max_hold, while the handler still runs")
			}
			time.Sleep(lock.DefaultLease)
			if err := store.Inspect(t.Context(), "lock.example.com/", ""); err != nil {
				t.Errorf("a lease later: %v", err)
			}
			return nil
		}))
		if herr, ok := err.(caddyhttp.HandlerError); !ok || herr.StatusCode != http.StatusGatewayTimeout {
			t.Errorf("error %v, want 504", err)
		}
	})
}

// The client's hang-up ends neither the request nor the lock, or both.
func TestHangUp(t *testing.T) {
	for _, mode := range []string{finishRun, stayRun, cancelRun} {
		t.Run(mode, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := lock.NewMemory()
				h := newHandler(t, &Handler{OnDisconnect: mode})
				h.backend = testBackend{lock.New(store, lock.Options{})}
				r, w := newRequest(http.MethodPost, "/")
				ctx, hangUp := context.WithCancel(r.Context())
				err := h.ServeHTTP(w, r.WithContext(ctx), caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
					hangUp()
					synctest.Wait()
					if ended := r.Context().Err() != nil; ended != (mode == cancelRun) {
						t.Errorf("the request ended: %v", ended)
					}
					if err := store.Inspect(t.Context(), "lock.example.com/", ""); err == nil {
						t.Error("the lock is gone while the handler runs")
					}
					return nil
				}))
				if err != nil {
					t.Error(err)
				}
				if err := store.Inspect(t.Context(), "lock.example.com/", ""); err != nil {
					t.Errorf("not released: %v", err)
				}
			})
		})
	}
}

// A client that hangs up while its request waits: with `stay` the request is served in its turn,
// if its body is here.
func TestHangUpInLine(t *testing.T) {
	for _, c := range []struct {
		name, mode, body string
		served           bool
	}{
		{"finish", finishRun, "body", false},
		{"cancel", cancelRun, "body", false},
		{"stay", stayRun, "body", true},
		{"stay without a body", stayRun, "", true},
		{"stay with a body that is still coming", stayRun, "a body beyond the buffer", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHandler(t, &Handler{OnDisconnect: c.mode, Wait: caddy.Duration(time.Minute), Buffer: new(int64(10))})
				h.backend = testBackend{lock.New(lock.NewMemory(), lock.Options{})}
				release := make(chan struct{})
				var served []string
				next := caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
					body, err := io.ReadAll(r.Body)
					served = append(served, string(body)) // guarded by the lock
					<-release
					return err
				})
				first := make(chan error)
				go func() {
					r, w := newRequest(http.MethodPost, "/")
					first <- h.ServeHTTP(w, r, next)
				}()
				synctest.Wait()
				second := make(chan error)
				ctx, hangUp := context.WithCancel(t.Context())
				go func() {
					r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/", strings.NewReader(c.body))
					w := httptest.NewRecorder()
					second <- h.ServeHTTP(w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil), next)
				}()
				synctest.Wait()
				hangUp()
				synctest.Wait()
				close(release)
				if err := <-first; err != nil {
					t.Error(err)
				}
				err := <-second
				if c.served != (err == nil) || c.served != (len(served) == 2) {
					t.Errorf("served %q, error %v", served, err)
				}
				if c.served && served[1] != c.body {
					t.Errorf("served %q, want its body %q", served, c.body)
				}
			})
		})
	}
}

// What a refused client is told: how long it takes until the one who has the lock, and those who
// wait for it, are done, judging by the last ones.
func TestRetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHandler(t, &Handler{Wait: caddy.Duration(time.Hour), Queue: new(3)})
		h.backend = testBackend{lock.New(lock.NewMemory(), lock.Options{})}
		next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			time.Sleep(10 * time.Second)
			return nil
		})
		serve := func(h *Handler) string {
			r, w := newRequest(http.MethodPost, "/")
			_ = h.ServeHTTP(w, r, next)
			return w.Header().Get("Retry-After")
		}
		impatient := *h
		impatient.Wait = 0
		impatient.acquire = append(slices.Clone(h.acquire), lock.Wait(0))

		var others sync.WaitGroup
		others.Go(func() { serve(h) })
		synctest.Wait()
		if after := serve(&impatient); after != "1" {
			t.Errorf("Retry-After %s when nothing is known, want 1", after)
		}
		for range 3 {
			others.Go(func() { serve(h) })
		}
		time.Sleep(15 * time.Second) // one was served for 10s, one is, two wait
		if after := serve(&impatient); after != "30" {
			t.Errorf("Retry-After %s with two in line, each served for 10s, want 30", after)
		}
		others.Go(func() { serve(h) })
		synctest.Wait()
		if after := serve(h); after != "40" {
			t.Errorf("Retry-After %s when the line is full with three, want 40", after)
		}
		others.Wait()
	})
}

// One lock within another: the same key goes through, another is taken; what ends the outer
// one ends the inner request.
func TestNesting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := lock.NewMemory()
		backend := testBackend{lock.New(store, lock.Options{})}
		outer := newHandler(t, &Handler{Name: []string{"a"}})
		same := newHandler(t, &Handler{Name: []string{"a"}})
		inner := newHandler(t, &Handler{Name: []string{"b"}, Wait: caddy.Duration(time.Hour)})
		for _, h := range []*Handler{outer, same, inner} {
			h.backend = backend
		}
		chain := func(next caddyhttp.HandlerFunc) caddyhttp.Handler {
			return caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
				return inner.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
					return same.ServeHTTP(w, r, next)
				}))
			})
		}
		r, w := newRequest(http.MethodPost, "/")
		ran := false
		if err := outer.ServeHTTP(w, r, chain(func(w http.ResponseWriter, r *http.Request) error {
			ran = true
			for _, key := range []string{"lock.a", "lock.b"} {
				if store.Inspect(t.Context(), key, "") == nil {
					t.Errorf("%s is not held", key)
				}
			}
			return nil
		})); err != nil || !ran {
			t.Errorf("error %v, ran %v", err, ran)
		}

		// The outer lock is lost while the inner request runs.
		r, w = newRequest(http.MethodPost, "/")
		err := outer.ServeHTTP(w, r, chain(func(w http.ResponseWriter, r *http.Request) error {
			if err := store.ForceRelease(t.Context(), "lock.a"); err != nil {
				t.Error(err)
			}
			lost := time.Now()
			<-r.Context().Done()
			if took := time.Since(lost); took > lock.DefaultLease/2 {
				t.Errorf("the inner request went on for %v without the outer lock", took)
			}
			return nil
		}))
		if herr, ok := err.(caddyhttp.HandlerError); !ok || herr.StatusCode != 503 {
			t.Errorf("outer lock lost: %v, want 503", err)
		}

		// The client hangs up, and the outer lock is lost, while the inner request waits.
		blocker, err := backend.Acquire(t.Context(), "b")
		if err != nil {
			t.Fatal(err)
		}
		never := func(http.ResponseWriter, *http.Request) error {
			t.Error("the request ran without its lock")
			return nil
		}
		begin := time.Now()
		r, w = newRequest(http.MethodPost, "/")
		ctx, hangUp := context.WithCancel(r.Context())
		time.AfterFunc(time.Second, hangUp)
		err = outer.ServeHTTP(w, r.WithContext(ctx), chain(never))
		if herr, ok := err.(caddyhttp.HandlerError); !ok || herr.StatusCode != 499 || time.Since(begin) != time.Second {
			t.Errorf("hang-up while waiting within another lock: %v after %v", err, time.Since(begin))
		}
		r, w = newRequest(http.MethodPost, "/")
		time.AfterFunc(time.Second, func() { _ = store.ForceRelease(t.Context(), "lock.a") })
		err = outer.ServeHTTP(w, r, chain(never))
		if herr, ok := err.(caddyhttp.HandlerError); !ok || herr.StatusCode != 503 {
			t.Errorf("outer lock lost while waiting: %v, want 503", err)
		}
		if err := blocker.Release(t.Context()); err != nil {
			t.Error(err)
		}
		for _, key := range []string{"lock.a", "lock.b"} {
			if err := store.Inspect(t.Context(), key, ""); err != nil {
				t.Errorf("%s is left: %v", key, err)
			}
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

// What a handler must have done for its delivery to be handled well; so it runs once or twice.
func TestWhatCountsAsHandled(t *testing.T) {
	for name, c := range map[string]struct {
		next func(http.ResponseWriter, *http.Request) error
		runs int
	}{
		"nothing is an empty 200": {func(http.ResponseWriter, *http.Request) error { return nil }, 1},
		"a whole answer":          {func(w http.ResponseWriter, _ *http.Request) error { _, err := w.Write([]byte("done")); return err }, 1},
		"less than was announced": {func(w http.ResponseWriter, _ *http.Request) error {
			w.Header().Set("Content-Length", "10")
			_, err := w.Write([]byte("half"))
			return err
		}, 2},
		"an error":           {func(http.ResponseWriter, *http.Request) error { return caddyhttp.Error(500, errors.New("failed")) }, 2},
		"an error behind it": {func(w http.ResponseWriter, _ *http.Request) error { w.WriteHeader(200); return errors.New("failed") }, 2},
		"a panic":            {func(w http.ResponseWriter, _ *http.Request) error { w.WriteHeader(200); panic(http.ErrAbortHandler) }, 2},
		"nothing, when it was told to stop": {func(_ http.ResponseWriter, r *http.Request) error {
			r.Context().Value(hangUpKey{}).(context.CancelFunc)()
			<-r.Context().Done()
			return nil
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHandler(t, &Handler{Name: []string{t.Name()}, Dedupe: &Dedupe{ID: "{http.request.method}"}, OnDisconnect: cancelRun})
			runs := 0
			for range 2 {
				func() {
					defer func() { _ = recover() }()
					ctx, hangUp := context.WithCancel(t.Context())
					defer hangUp()
					w := httptest.NewRecorder()
					r := httptest.NewRequestWithContext(context.WithValue(ctx, hangUpKey{}, hangUp), http.MethodPost, "/", nil)
					_ = h.ServeHTTP(w, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil), caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
						runs++
						return c.next(w, r)
					}))
				}()
			}
			if runs != c.runs {
				t.Errorf("ran %d times, want %d", runs, c.runs)
			}
		})
	}
}

type hangUpKey struct{}
