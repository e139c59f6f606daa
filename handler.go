package redislock

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// Values of the placeholder {http.redis_lock.outcome}.
const (
	outcomeAcquired = "acquired"
	outcomeHeld     = "held"
	outcomeTimeout  = "timeout"
	outcomeFull     = "full"
	outcomeNoName   = "no_name"
	outcomeError    = "error"
	outcomeLost     = "lost"
	outcomePassed   = "passed"
)

// statusClientClosed is what Caddy, like nginx, logs for a client that hung up.
const statusClientClosed = 499

// retryAfter is what a refused client is told, in seconds.
const retryAfter = 1

var (
	errNoName      = errors.New("the request has no lock name: none of the configured names resolves")
	errUnavailable = errors.New("redis is unavailable, so the lock cannot be taken")
)

// ServeHTTP is the way of one request: does it need a lock, and which; take it, or refuse
// the request; serve it; give the lock back.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if !h.needsLock(r) {
		return next.ServeHTTP(w, r)
	}
	report := newReport(r)
	name, err := h.resolveName(report.repl)
	if err != nil {
		report.outcome(outcomeNoName)
		return err
	}
	report.name(name)
	if name == "" {
		if h.OnNoName == pass {
			report.outcome(outcomePassed)
			return next.ServeHTTP(w, r)
		}
		report.outcome(outcomeNoName)
		return caddyhttp.Error(http.StatusBadRequest, errNoName)
	}

	locker, done, err := h.backend.use()
	if err != nil {
		return err
	}
	defer done()
	arrived := time.Now()
	held, err := locker.Acquire(r.Context(), name, h.acquire...)
	report.waited(time.Since(arrived))
	if err != nil {
		return h.refuse(w, report, name, err)
	}
	if held.Local() {
		h.logger.Warn("redis is unavailable: the lock holds on this caddy only", zap.String("name", name))
		report.outcome(outcomePassed)
	} else {
		report.outcome(outcomeAcquired)
		report.fence(held.Fence())
	}
	return h.serveHolding(w, r, next, held, report, name)
}

// needsLock is false for requests that pass at no cost.
func (h *Handler) needsLock(r *http.Request) bool {
	if h.Methods[0] == unsafe {
		if safe(r.Method) {
			return false
		}
	} else if !slices.Contains(h.Methods, r.Method) {
		return false
	}
	return !isWebSocketHandshake(r)
}

// safe is true for the methods that RFC 9110 and its kin call safe: they change nothing.
func safe(method string) bool {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace,
		"PROPFIND", "REPORT", "SEARCH", "QUERY":
		return true
	}
	return false
}

// isWebSocketHandshake tells the only requests that a connection of unknown length grows out
// of, in HTTP/1.1, HTTP/2 and HTTP/3. Any other method with an Upgrade header is locked: a
// header must not be a way around the lock.
func isWebSocketHandshake(r *http.Request) bool {
	switch r.Method {
	case http.MethodGet:
		return httpguts.HeaderValuesContainsToken(r.Header["Connection"], "upgrade") &&
			httpguts.HeaderValuesContainsToken(r.Header["Upgrade"], "websocket")
	case http.MethodConnect:
		return r.ProtoMajor == 2 && r.Header.Get(":protocol") == "websocket" ||
			r.ProtoMajor == 3 && r.Proto == "websocket"
	}
	return false
}

// resolveName returns the first name that resolves, or "". The name is computed once, here:
// handlers behind this one may rewrite what it is made of.
func (h *Handler) resolveName(repl *caddy.Replacer) (string, error) {
	for _, template := range h.Name {
		name, err := repl.ReplaceFunc(template, func(_ string, value any) (any, error) {
			// A body placeholder answers with an error as its value when the body is too
			// large; its text must not become the name.
			if tooLarge, ok := value.(caddyhttp.RequestBodyLimitError); ok {
				return nil, caddyhttp.Error(tooLarge.StatusCode(), tooLarge)
			}
			// An empty part would put requests that have nothing in common under one lock.
			if caddy.ToString(value) == "" {
				return nil, errNoName
			}
			return value, nil
		})
		switch {
		case err == nil:
			return name, nil
		case !errors.Is(err, errNoName):
			return "", err
		}
	}
	return "", nil
}

// refuse turns the reason why a lock was not taken into an error for Caddy's error routes.
func (h *Handler) refuse(w http.ResponseWriter, report report, name string, err error) error {
	if errors.Is(err, lock.ErrUnavailable) {
		h.logger.Error("cannot take the lock", zap.String("name", name), zap.Error(err))
		report.outcome(outcomeError)
		return report.retryLater(w, http.StatusServiceUnavailable, errUnavailable)
	}
	switch {
	case errors.Is(err, lock.ErrHeld):
		report.outcome(outcomeHeld)
		if held, ok := errors.AsType[*lock.HeldError](err); ok && held.Why == lock.ForeignValue {
			h.foreignSeen.Do(func() {
				h.logger.Warn("the lock's key contains something that is not a lock",
					zap.String("name", name), zap.Error(err))
			})
		}
	case errors.Is(err, lock.ErrTimeout):
		report.outcome(outcomeTimeout)
	case errors.Is(err, lock.ErrLineFull):
		report.outcome(outcomeFull)
	default:
		report.outcome(outcomeError)
		return caddyhttp.Error(statusClientClosed, err)
	}
	return report.retryLater(w, h.Status, err)
}

// serveHolding runs the next handler with the lock held, under a context that ends when the
// lock does. The release comes in a defer, as handlers panic to abort a response, and before
// this returns: net/http completes the response after that, so a client that has its answer
// never meets its own lock.
func (h *Handler) serveHolding(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler,
	held *lock.Handle, report report, name string,
) (err error) {
	defer func() {
		released := held.Release(context.Background())
		switch {
		case errors.Is(released, lock.ErrLost):
			h.logger.Error("the lock was lost while the request was served",
				zap.String("name", name), zap.Error(released))
			report.outcome(outcomeLost)
			if err != nil {
				err = report.retryLater(w, http.StatusServiceUnavailable, released)
			}
		case released != nil:
			h.logger.Error("cannot release the lock; trying on in the background",
				zap.String("name", name), zap.Error(released))
		}
	}()
	return next.ServeHTTP(w, r.WithContext(held.Context()))
}

// report tells what became of a request: to placeholders and to the access log.
type report struct {
	repl  *caddy.Replacer
	extra *caddyhttp.ExtraLogFields
}

func newReport(r *http.Request) report {
	p := report{repl: r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)}
	p.extra, _ = r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields)
	for _, placeholder := range []string{"name", "fence", "waited", "outcome", "retry_after"} {
		p.repl.Set("http.redis_lock."+placeholder, "")
	}
	return p
}

func (p report) name(name string) {
	p.repl.Set("http.redis_lock.name", name)
	p.log(zap.String("redis_lock_name", name))
}

func (p report) outcome(outcome string) {
	p.repl.Set("http.redis_lock.outcome", outcome)
	p.log(zap.String("redis_lock_outcome", outcome))
}

func (p report) waited(waited time.Duration) {
	p.repl.Set("http.redis_lock.waited", strconv.FormatFloat(waited.Seconds(), 'f', 3, 64))
	p.log(zap.Duration("redis_lock_waited", waited))
}

func (p report) fence(fence int64) {
	p.repl.Set("http.redis_lock.fence", strconv.FormatInt(fence, 10))
}

// retryLater is an error with a Retry-After header, which survives Caddy's error routes.
func (p report) retryLater(w http.ResponseWriter, status int, err error) error {
	seconds := strconv.Itoa(retryAfter)
	w.Header().Set("Retry-After", seconds)
	p.repl.Set("http.redis_lock.retry_after", seconds)
	return caddyhttp.Error(status, err)
}

func (p report) log(field zap.Field) {
	if p.extra != nil {
		p.extra.Set(field)
	}
}
