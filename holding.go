package redislock

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

var (
	errLost    = errors.New("the lock was lost while the request was served")
	errMaxHold = errors.New("the request held the lock for as long as max_hold allows")
)

// holding is a request's time with the lock: from when it was taken until the handlers have
// returned. It ends their context when the lock is lost, when max_hold has passed, and, if so
// configured, when the client hangs up.
type holding struct {
	h        *Handler
	name     string
	held     *lock.Handle
	since    time.Time
	w        http.ResponseWriter // the client's
	run      *http.Request       // what the handlers are given
	body     *streamedBody       // of run, unless it was read before the lock was taken
	response *response

	ctx    context.Context
	cancel context.CancelFunc

	mu       sync.Mutex
	reason   error // errLost, errMaxHold, or nil: why the handlers' time is over
	watchers sync.WaitGroup
	stops    []func() bool
}

// hold begins. client is the context that ends when the client hangs up.
//
// The handlers' context ends by a plain cancellation, as if the client were gone: reverse_proxy
// would take anything else for a failure of the upstream, and take it out of rotation.
func (h *Handler) hold(w http.ResponseWriter, r *http.Request, client context.Context,
	held *lock.Handle, locker *lock.Locker, key, name string,
) *holding {
	x := &holding{
		h: h, name: name, held: held, w: w, since: time.Now(),
		response: newResponse(w, r, h.OnDisconnect != cancelRun),
	}
	outer, nested := r.Context().Value(holdingKey{}).(*mark)
	ctx := context.WithValue(context.WithoutCancel(r.Context()), holdingKey{}, &mark{
		locker: locker, key: key, token: held.Fence(), field: h.fence, client: client, outer: outer,
	})
	x.ctx, x.cancel = context.WithCancel(ctx)
	x.prepare(r)
	if nested {
		x.watch(r.Context(), x.cancel) // the outer lock's end ends the inner request
	}
	x.watch(held.Context(), x.lost)
	if h.OnDisconnect == cancelRun {
		x.watch(client, x.cancel)
	}
	x.watchers.Add(1)
	timer := time.AfterFunc(time.Duration(h.MaxHold), func() {
		defer x.watchers.Done()
		x.heldTooLong()
	})
	x.stops = append(x.stops, timer.Stop)
	return x
}

// prepare makes the handlers' request of the client's. Its body is a reader of its own, as
// Caddy's {http.request.body} reads the client's request and puts another body there.
func (x *holding) prepare(client *http.Request) {
	x.run = client.WithContext(x.ctx)
	switch body := client.Body.(type) {
	case nil:
	case *bufferedBody:
		x.run.Body = newBufferedBody(body.content)
	default:
		if body != http.NoBody {
			x.body = &streamedBody{client: client}
			x.run.Body = x.body
		}
	}
	x.h.fence.set(x.run, x.held.Fence())
}

// watch calls f when ctx ends, unless join comes before.
func (x *holding) watch(ctx context.Context, f func()) {
	x.watchers.Add(1)
	x.stops = append(x.stops, context.AfterFunc(ctx, func() {
		defer x.watchers.Done()
		f()
	}))
}

// noteHandled has the delivery count as handled if the handlers, which have returned, answered that
// all went well. One that wrote nothing did so, unless it was told to stop.
func (x *holding) noteHandled() {
	if status := x.response.answered(); status/100 == 2 || status == 0 && x.ctx.Err() == nil {
		x.held.Done(time.Duration(x.h.Dedupe.Window))
	}
}

// join ends the watching, and returns when nothing of it is under way any more. It returns why
// the handlers were cut off; nil if they were not.
func (x *holding) join() error {
	for _, stop := range x.stops {
		if stop() {
			x.watchers.Done()
		}
	}
	x.watchers.Wait()
	x.cancel()
	return x.reason
}

func (x *holding) lost() {
	log := x.h.logger.With(nameField(x.name), zap.Error(context.Cause(x.held.Context())))
	switch {
	case x.h.OnLost == continueRun:
		log.Error("the lock is lost; the request goes on without it")
	case !x.cut(errLost):
		log.Error("the lock has run out: the handler ignores that it was cancelled at max_hold")
	default:
		log.Error("the lock is lost; the request is cancelled")
	}
}

// heldTooLong leaves the lock to run out: it is released when the handlers have returned, or
// ends with its lease if they never do.
func (x *holding) heldTooLong() {
	if x.cut(errMaxHold) {
		x.h.logger.Error("max_hold has passed; the request is cancelled",
			nameField(x.name), zap.Duration("max_hold", time.Duration(x.h.MaxHold)))
	}
	x.held.StopRenewing()
}

// cut ends the handlers' time. It is false if that was over already.
func (x *holding) cut(reason error) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.reason != nil {
		return false
	}
	x.reason = reason
	x.response.cut() // before the handlers hear of it: what they answer to that is not the answer
	x.cancel()
	if x.body != nil && !x.body.ended.Load() {
		// Or net/http would wait for the rest of the body before it sends the error.
		_ = http.NewResponseController(x.w).SetReadDeadline(time.Now())
	}
	return true
}

// holdingKey is the context key of a *mark.
type holdingKey struct{}

// A mark in a request's context says which lock it is served with, and within which others.
type mark struct {
	locker *lock.Locker
	key    string
	token  int64           // the fencing token; 0 if the lock is local
	field  fenceHeader     // that has it
	client context.Context // ends when the client hangs up
	outer  *mark
}

// marks calls f with each lock that the request is served with, from within, until f is true.
func marks(r *http.Request, f func(*mark) bool) *mark {
	m, _ := r.Context().Value(holdingKey{}).(*mark)
	for m != nil && !f(m) {
		m = m.outer
	}
	return m
}

// markOf returns the mark of a lock that the request is served with already, or nil.
func markOf(r *http.Request, locker *lock.Locker, key string) *mark {
	return marks(r, func(m *mark) bool { return m.locker == locker && m.key == key })
}

// isFenced is true if the field is one of ours already.
func isFenced(r *http.Request, field fenceHeader) bool {
	return marks(r, func(m *mark) bool { return m.field == field }) != nil
}

// clientContext returns the context that ends when the client hangs up. Within another lock
// that is not the request's own any more.
func clientContext(r *http.Request) context.Context {
	if m, ok := r.Context().Value(holdingKey{}).(*mark); ok {
		return m.client
	}
	return r.Context()
}

// waitingContext ends when the client hangs up, unless it is to stay in line and its body is here,
// and when an outer lock is lost.
func (h *Handler) waitingContext(r *http.Request, client context.Context) (context.Context, context.CancelFunc) {
	nested := client != r.Context()
	switch stays := h.OnDisconnect == stayRun; {
	case stays && nested:
		return stayers.begin(r.Context())
	case stays && hasWholeBody(r):
		return stayers.begin(context.WithoutCancel(client))
	case stays:
		return stayers.begin(client)
	case !nested:
		return client, func() {}
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	stop := context.AfterFunc(client, func() { cancel(context.Cause(client)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}
