package redislock

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// statusClientClosed is what Caddy, like nginx, logs for a client that hung up.
const statusClientClosed = 499

var (
	errNoName      = errors.New("the request has no lock name: none of the configured names resolves")
	errEmpty       = errors.New("a placeholder is empty")
	errUnavailable = errors.New("redis is unavailable, so the lock cannot be taken")
)

// ServeHTTP is the way of one request: does it need a lock, and which; read its body; take
// the lock, or refuse the request; serve it; give the lock back.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	h.fence.strip(r)
	if !h.needsLock(r) {
		return next.ServeHTTP(w, r)
	}
	locker, done, err := h.backend.use()
	if err != nil {
		return err
	}
	defer done()

	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if err := h.readFields(r, repl); err != nil {
		newReport(r, repl).outcome(outcomeError)
		return err
	}
	name, nameErr := h.resolveName(repl)
	key := lock.Key(h.Prefix, name)
	if around := markOf(r, locker, key); around != nil && nameErr == nil {
		h.fence.set(r, around.token)
		return next.ServeHTTP(w, r)
	}
	report := newReport(r, repl)
	switch {
	case errors.Is(nameErr, errNoName) && h.OnNoName == pass:
		report.outcome(outcomePassed)
		return next.ServeHTTP(w, r)
	case nameErr != nil:
		report.outcome(outcomeNoName)
		return nameErr
	}
	report.name(name)
	acquire, err := h.acquireOptions(repl)
	if err != nil {
		report.outcome(outcomeError)
		return err
	}
	if err := h.bufferBody(r); err != nil {
		report.outcome(outcomeError)
		return err
	}

	client := clientContext(r)
	waiting, stop := h.waitingContext(r, client)
	arrived := time.Now()
	held, err := locker.Acquire(waiting, name, acquire...)
	report.waited(time.Since(arrived))
	if err != nil {
		defer stop()
		return h.refuse(w, report, name, err)
	}
	stop()
	report.taken(held)
	return h.serve(next, report, h.hold(w, r, client, held, locker, key, name))
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

// resolveName returns the first name that resolves, and otherwise an error for the client. The
// name is computed once, here: handlers behind this one may rewrite what it is made of.
func (h *Handler) resolveName(repl *caddy.Replacer) (string, error) {
	for _, template := range h.Name {
		if name, err := expand(repl, template); !errors.Is(err, errEmpty) {
			return name, err
		}
	}
	return "", caddyhttp.Error(http.StatusBadRequest, errNoName)
}

// expand returns errEmpty if the template does not resolve, and otherwise errors for the client.
func expand(repl *caddy.Replacer, template string) (string, error) {
	return repl.ReplaceFunc(template, func(_ string, value any) (any, error) {
		// A body placeholder answers with an error as its value when the body is too
		// large; its text must not become the name.
		if tooLarge, ok := value.(caddyhttp.RequestBodyLimitError); ok {
			return nil, caddyhttp.Error(tooLarge.StatusCode(), tooLarge)
		}
		// An empty part would put requests that have nothing in common under one lock.
		if caddy.ToString(value) == "" {
			return nil, errEmpty
		}
		return value, nil
	})
}

// acquireOptions says how the lock is taken: for which delivery, if the request is one.
func (h *Handler) acquireOptions(repl *caddy.Replacer) ([]lock.AcquireOption, error) {
	if h.Dedupe == nil {
		return h.acquire, nil
	}
	delivery, err := expand(repl, h.Dedupe.ID)
	switch {
	case err == nil:
		return append(slices.Clip(h.acquire), lock.Dedupe(delivery)), nil
	case errors.Is(err, errEmpty):
		return h.acquire, nil
	}
	return nil, err
}

// refuse answers a request that does not get the lock: most are errors for Caddy's error routes.
func (h *Handler) refuse(w http.ResponseWriter, report report, name string, err error) error {
	var why lock.Reason
	var line int
	if _, ok := errors.AsType[*lock.NewestError](err); ok {
		h.logger.Error("the newest request was not served, nor were those that it displaced",
			nameField(name), zap.Error(err))
	}
	switch {
	case errors.Is(err, lock.ErrDone):
		report.outcome(outcomeDuplicate)
		w.WriteHeader(http.StatusOK)
		return nil
	case errors.Is(err, lock.ErrSuperseded):
		report.outcome(outcomeSuperseded)
		if h.Supersede >= 400 {
			return caddyhttp.Error(h.Supersede, err)
		}
		w.WriteHeader(h.Supersede)
		return nil
	case errors.Is(err, lock.ErrUnavailable):
		// The log has it already, once for the whole outage.
		if away, ok := errors.AsType[*lock.UnavailableError](err); ok && away.ThisKey {
			h.refusedSeen.Do(func() {
				h.logger.Error("redis refuses a lock", nameField(name), zap.Error(away.Err), zap.String("remedy", remedy(away.Err)))
			})
		}
		report.outcome(outcomeError)
		return report.retryLater(w, http.StatusServiceUnavailable, 0, errUnavailable)
	case errors.Is(err, lock.ErrHeld):
		held, _ := errors.AsType[*lock.HeldError](err)
		why, line = held.Why, held.Line
		report.outcome(outcomeHeld)
	case errors.Is(err, lock.ErrTimeout):
		timeout, _ := errors.AsType[*lock.TimeoutError](err)
		why, line = timeout.Why, timeout.Line
		report.outcome(outcomeTimeout)
	case errors.Is(err, lock.ErrLineFull):
		full, _ := errors.AsType[*lock.LineFullError](err)
		why, line = full.Why, full.Line
		report.outcome(outcomeFull)
	case errors.Is(err, errExiting):
		h.logger.Error("the request waited when caddy exited, and is not served", nameField(name))
		report.outcome(outcomeError)
		return report.retryLater(w, http.StatusServiceUnavailable, 0, err)
	default: // the client is gone
		report.outcome(outcomeError)
		return caddyhttp.Error(statusClientClosed, err)
	}
	if why == lock.ForeignValue {
		h.foreignSeen.Do(func() {
			h.logger.Warn("the lock's key contains something that is not a lock",
				nameField(name), zap.Error(err))
		})
	}
	status := h.Status
	if why == lock.SameDelivery {
		status = http.StatusConflict
	}
	return report.retryLater(w, status, h.holdTime.after(line), err)
}

// serve runs the next handler with the lock held. The release comes in a defer, as handlers
// panic to abort a response, and before the answer's end goes out: a client that has its answer
// never meets its own lock.
func (h *Handler) serve(next caddyhttp.Handler, report report, x *holding) (err error) {
	returned := false
	defer func() {
		if returned && err == nil && h.Dedupe != nil {
			x.noteHandled()
		}
		cut := x.join()
		h.holdTime.add(time.Since(x.since))
		released := x.held.Release(context.Background())
		h.reportEnd(report, x.name, cut, released)
		switch {
		case returned && (cut == nil || x.response.complete()):
			x.response.finish()
			return
		case cut == nil:
			return // a panic goes on
		}
		// The handlers were cancelled, and may have aborted over that.
		if v := recover(); v != nil && v != http.ErrAbortHandler {
			panic(v)
		}
		if x.response.out() {
			panic(http.ErrAbortHandler) // the client must not take what it has for the answer
		}
		x.response.takeBack()
		err = report.cutOff(x.w, cut)
	}()
	err = next.ServeHTTP(x.response, x.run)
	returned = true
	return err
}

func (h *Handler) reportEnd(report report, name string, cut, released error) {
	switch {
	case cut == errMaxHold:
		report.outcome(outcomeMaxHold)
	case errors.Is(released, lock.ErrLost):
		report.outcome(outcomeLost)
	}
	switch {
	case errors.Is(released, lock.ErrLost) && cut == nil && h.OnLost == cancelRun:
		h.logger.Error("the lock was lost when it was about to be released",
			nameField(name), zap.Error(released))
	case errors.Is(released, lock.ErrUnavailable):
		h.logger.Warn("the lock cannot be released yet; trying on in the background",
			nameField(name), zap.Error(released))
	}
}
