package redislock

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// serve puts h and next behind a real net/http server. onError is the error route.
func serve(t *testing.T, h *Handler, next caddyhttp.HandlerFunc, onError func(w http.ResponseWriter, r *http.Request, status int)) *http.Response {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
		if err := h.ServeHTTP(w, r, next); err != nil {
			onError(w, r, err.(caddyhttp.HandlerError).StatusCode)
		}
	}))
	t.Cleanup(server.Close)
	response, err := http.Post(server.URL, "text/plain", strings.NewReader("payload"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { response.Body.Close() })
	return response
}

func errorPage(w http.ResponseWriter, _ *http.Request, status int) {
	w.WriteHeader(status)
	_, _ = io.WriteString(w, "page")
}

// soon is a max_hold that passes while the handlers wait for it.
const soon = caddy.Duration(50 * time.Millisecond)

// An answer that is complete when the handlers' time is over reaches the client.
func TestCompleteAnswerSurvivesCut(t *testing.T) {
	for _, length := range []string{"5", ""} {
		response := serve(t, newHandler(t, &Handler{Name: []string{"complete"}, MaxHold: soon}),
			func(w http.ResponseWriter, r *http.Request) error {
				if length != "" {
					w.Header().Set("Content-Length", length)
				}
				_, _ = io.WriteString(w, "hello")
				<-r.Context().Done()
				return nil
			}, errorPage)
		if body, err := io.ReadAll(response.Body); string(body) != "hello" || err != nil {
			t.Errorf("length %q: body %q, %v", length, body, err)
		}
	}
}

// What the handlers have set for an answer that does not go out is not part of the error.
func TestCutTakesHeaderBack(t *testing.T) {
	response := serve(t, newHandler(t, &Handler{Name: []string{"header"}, MaxHold: soon}),
		func(w http.ResponseWriter, r *http.Request) error {
			w.Header().Set("Content-Length", "100")
			w.Header().Set("Set-Cookie", "a=b")
			<-r.Context().Done()
			w.WriteHeader(http.StatusOK)
			return nil
		}, errorPage)
	body, err := io.ReadAll(response.Body)
	if response.StatusCode != 504 || string(body) != "page" || err != nil || response.Header.Get("Set-Cookie") != "" {
		t.Errorf("status %d, body %q, %v, header %v", response.StatusCode, body, err, response.Header)
	}
}

// The error route's request is not cancelled, as its client is there.
func TestCutLeavesClientAlone(t *testing.T) {
	for _, buffer := range []int64{0, 3, 100} {
		response := serve(t, newHandler(t, &Handler{Name: []string{"alone"}, MaxHold: soon, Buffer: &buffer}),
			func(w http.ResponseWriter, r *http.Request) error {
				_, _ = io.ReadAll(r.Body)
				<-r.Context().Done()
				return nil
			}, func(w http.ResponseWriter, r *http.Request, status int) {
				select {
				case <-r.Context().Done():
					t.Errorf("buffer %d: the client's request was cancelled", buffer)
				case <-time.After(20 * time.Millisecond): // as long as a route may take
				}
				errorPage(w, r, status)
			})
		if response.StatusCode != 504 {
			t.Errorf("status %d", response.StatusCode)
		}
	}
}

// {http.request.body} and the app see the same body, however much of it was buffered.
func TestBodyIsReadTwice(t *testing.T) {
	for _, buffer := range []int64{0, 3, 100} {
		response := serve(t, newHandler(t, &Handler{Name: []string{"twice"}, Buffer: &buffer}),
			func(w http.ResponseWriter, r *http.Request) error {
				repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
				_, _ = io.WriteString(w, repl.ReplaceAll("{http.request.body}", "")+"|")
				_, err := io.Copy(w, r.Body)
				return err
			}, errorPage)
		if body, err := io.ReadAll(response.Body); string(body) != "payload|payload" || err != nil {
			t.Errorf("buffer %d: %q, %v", buffer, body, err)
		}
	}
}

// Fields that are set after a header without a body was written are not part of it.
func TestKeptHeaderIsFinal(t *testing.T) {
	response := serve(t, newHandler(t, &Handler{Name: []string{"final"}}),
		func(w http.ResponseWriter, r *http.Request) error {
			w.Header().Set("X-Early", "yes")
			w.WriteHeader(http.StatusNoContent)
			w.Header().Set("X-Late", "yes")
			return nil
		}, errorPage)
	if response.Header.Get("X-Early") != "yes" || response.Header.Get("X-Late") != "" {
		t.Errorf("header %v", response.Header)
	}
}

// Trailers survive, announced or not.
func TestTrailers(t *testing.T) {
	response := serve(t, newHandler(t, &Handler{Name: []string{"trailers"}}),
		func(w http.ResponseWriter, r *http.Request) error {
			w.Header().Set("Trailer", "X-Announced")
			_, _ = io.WriteString(w, "body")
			w.Header().Set("X-Announced", "yes")
			w.Header().Set(http.TrailerPrefix+"X-Not-Announced", "yes")
			return nil
		}, errorPage)
	_, _ = io.ReadAll(response.Body)
	for _, field := range []string{"X-Announced", "X-Not-Announced"} {
		if response.Trailer.Get(field) != "yes" {
			t.Errorf("trailers %v have no %s", response.Trailer, field)
		}
	}
}

// Within a redis_lock with the same fence_header the field stays, whatever the inner one does.
func TestNestedFence(t *testing.T) {
	outer := newHandler(t, &Handler{Name: []string{"fenced"}, FenceHeader: "X-Fence"})
	for name, inner := range map[string]*Handler{
		"same name":      {Name: []string{"fenced"}},
		"other method":   {Name: []string{"fenced"}, Methods: []string{"PUT"}},
		"no name":        {Name: []string{"{http.request.header.X-None}"}, OnNoName: pass},
		"another name":   {Name: []string{"fenced too"}},
		"another header": {Name: []string{"fenced"}, FenceHeader: "X-Token"},
	} {
		if inner.FenceHeader == "" {
			inner.FenceHeader = "x-fence"
		}
		newHandler(t, inner)
		r, w := newRequest(http.MethodPost, "/")
		r.Header.Set("X-Fence", "1")
		r.Header.Set("X-Token", "1")
		err := outer.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			return inner.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
				if fence := r.Header.Get("X-Fence"); len(fence) < 10 {
					t.Errorf("%s: the app gets the fence %q", name, fence)
				}
				if name == "another header" && r.Header.Get("X-Token") != r.Header.Get("X-Fence") {
					t.Errorf("the app gets the fences %q and %q", r.Header.Get("X-Fence"), r.Header.Get("X-Token"))
				}
				return nil
			}))
		}))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// sometimesAway is a Store that can be unavailable.
type sometimesAway struct {
	lock.Store
	away atomic.Bool
}

func (s *sometimesAway) check() error {
	if s.away.Load() {
		return &lock.UnavailableError{Err: errors.New("away")}
	}
	return nil
}

func (s *sometimesAway) Acquire(ctx context.Context, key string, claim lock.Claim) (lock.Grant, error) {
	if err := s.check(); err != nil {
		return lock.Grant{}, err
	}
	return s.Store.Acquire(ctx, key, claim)
}

func (s *sometimesAway) Renew(ctx context.Context, key string, claim lock.Claim) (lock.Grant, error) {
	if err := s.check(); err != nil {
		return lock.Grant{}, err
	}
	return s.Store.Renew(ctx, key, claim)
}

func (s *sometimesAway) Release(ctx context.Context, key string, claim lock.Claim) (lock.Successor, error) {
	if err := s.check(); err != nil {
		return lock.Successor{}, err
	}
	return s.Store.Release(ctx, key, claim)
}

func (s *sometimesAway) Inspect(ctx context.Context, key string, token lock.Token) error {
	if err := s.check(); err != nil {
		return err
	}
	return s.Store.Inspect(ctx, key, token)
}

// With on_redis_error pass a name stays one at a time on this Caddy, also when one that holds it
// goes on after its lock was lost.
func TestPassNeverOverlapsHere(t *testing.T) {
	for _, onLost := range []string{cancelRun, continueRun} {
		t.Run(onLost, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &sometimesAway{Store: lock.NewMemory()}
				h := newHandler(t, &Handler{OnRedisError: pass, OnLost: onLost})
				locker := lock.New(store, lock.Options{})
				h.backend = testBackend{locker}
				var running, most atomic.Int32
				post := func(stubborn time.Duration) error {
					r, w := newRequest(http.MethodPost, "/")
					return h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
						most.Store(max(most.Load(), running.Add(1)))
						defer running.Add(-1)
						time.Sleep(stubborn)
						return nil
					}))
				}
				first := make(chan error)
				go func() { first <- post(5 * time.Minute) }()
				synctest.Wait()
				store.away.Store(true)
				time.Sleep(time.Minute) // the lease has passed
				if herr, ok := post(0).(caddyhttp.HandlerError); !ok || herr.StatusCode != http.StatusLocked {
					t.Errorf("beside one that goes on: %v, want 423", herr)
				}
				<-first
				if err := post(0); err != nil {
					t.Errorf("after it: %v", err)
				}
				if most.Load() != 1 {
					t.Errorf("%d at the same time", most.Load())
				}
				store.away.Store(false)
				if err := locker.Close(t.Context()); err != nil { // joins what goes on in the background
					t.Error(err)
				}
			})
		})
	}
}
