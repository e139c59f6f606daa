// Package redislock is a Caddy HTTP middleware that serves requests one at a time: it takes a
// named lock in Redis before a mutating request goes on, and gives it back when the answer
// is complete. See [Handler].
package redislock

import (
	"fmt"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

func init() {
	caddy.RegisterModule(Handler{})
}

const (
	defaultName  = "{http.request.host}{http.request.uri.path}"
	unsafe       = "unsafe" // in methods: all but the safe ones
	reject, pass = "reject", "pass"
	finishRun    = "finish"
	stayRun      = "stay"
	cancelRun    = "cancel"
	continueRun  = "continue"

	getsetProtocol = "getset"
	tokenProtocol  = "token"

	defaultMaxHold = 10 * time.Minute
	defaultBuffer  = 1 << 20

	defaultWindow    = 24 * time.Hour
	defaultDisplaced = http.StatusAccepted
)

// Handler takes a lock before a mutating request reaches the next handler, and releases it
// when that handler has returned. A request whose lock somebody else holds, on this Caddy or
// on any other that shares the Redis, waits in line or is answered with 423 (Locked).
//
// Errors are left to Caddy's error routes:
//
//   - contention: `status` (423), with Retry-After; 409, too, if it is with the same delivery;
//   - no name resolves: 400;
//   - a request body beyond `request_body max_size`: 413;
//   - Redis cannot be asked: 503, with Retry-After;
//   - the lock was lost while the next handler worked, and nothing was sent yet: 503, with
//     Retry-After;
//   - `max_hold` was reached, and nothing was sent yet: 504.
//
// Placeholders, for the handlers behind this one, error routes and logs:
//
// Placeholder | Description
// ------------|---------------
// `{http.redis_lock.name}` | The lock's name, as it resolved
// `{http.redis_lock.fence}` | The fencing token: grows with every lock taken for the name
// `{http.redis_lock.waited}` | Seconds that the request waited for the lock, such as 0.125
// `{http.redis_lock.outcome}` | `acquired`, `held`, `timeout` (wait ran out), `full`, `no_name`, `error` (Redis, or the client is gone), `lost`, `max_hold`, `passed` (went on without a lock), `duplicate` (the delivery was handled before), `superseded`
// `{http.redis_lock.retry_after}` | Whole seconds of the Retry-After header, if the request was refused
// `{http.redis_lock.json.<path>}` | A value of the buffered JSON body: keys with dots between, `\.` for a dot in a key, numbers for the places of an array. Only if a name, or the id of a delivery, asks for it
// `{http.redis_lock.form.<field>}` | A field of the buffered urlencoded form. Likewise
//
// The access log gets `redis_lock_name`, `redis_lock_outcome` and `redis_lock_waited`.
type Handler struct {
	// Names of the lock, with placeholders: the first one all of whose placeholders resolve
	// to something is used. Sites that use the same name share the lock.
	// Default: `{http.request.host}{http.request.uri.path}`.
	Name []string `json:"name,omitempty"`

	// What becomes of a request for which no name resolves: `reject` (400, the default), or
	// `pass` (it goes on without a lock).
	OnNoName string `json:"on_no_name,omitempty"`

	// Methods of the requests that need the lock; all others pass at no cost. `unsafe` stands
	// for all but GET, HEAD, OPTIONS, TRACE, PROPFIND, REPORT, SEARCH and QUERY. WebSocket
	// handshakes never need it. Default: POST, PUT, PATCH and DELETE.
	Methods []string `json:"methods,omitempty"`

	// How long the lock outlives a Caddy that died with it: whole seconds, from 1s to 24h. It is
	// renewed while the request runs. Default: 30s.
	Lease caddy.Duration `json:"lease,omitempty"`

	// How long a request waits in line while the lock is held. Default: 0, it is refused at
	// once.
	Wait caddy.Duration `json:"wait,omitempty"`

	// How many requests may wait for one name on this Caddy; those beyond are refused at
	// once. Default: 64.
	Queue *int `json:"queue,omitempty"`

	// The longest that one request may keep the lock, renewals included. It is cancelled then.
	// Default: 10m.
	MaxHold caddy.Duration `json:"max_hold,omitempty"`

	// How many bytes of the request's body are read before the lock is taken, so that a slow
	// sender holds nothing. A longer body streams on with the lock held. 0: none, for requests
	// that are answered while they are sent. Default: 1 MiB.
	Buffer *int64 `json:"buffer,omitempty"`

	// What becomes of a request whose sender hangs up: `finish` (the default: if it is served
	// already it is served to its end, with the lock held, and if it waits it leaves the line),
	// `stay` (if it waits it keeps its place, too, and is served in its turn, unless its body
	// is larger than the buffer: for senders that never send again), or `cancel` (it ends).
	OnDisconnect string `json:"on_disconnect,omitempty"`

	// What becomes of a request whose lock is lost while it is served: `cancel` (the default),
	// or `continue` (it goes on unlocked, which is logged).
	OnLost string `json:"on_lost,omitempty"`

	// A field of the request to the next handler that is set to the fencing token. What the
	// client sends under this name is removed, from requests without the lock, too.
	FenceHeader string `json:"fence_header,omitempty"`

	// The status that contention is answered with, from 400 to 599. Default: 423 (Locked).
	Status int `json:"status,omitempty"`

	// The beginning of every key in Redis: name foo makes key lock.foo. No braces. Default:
	// `lock.`.
	Prefix string `json:"prefix,omitempty"`

	// What becomes of a request that needs the lock while Redis cannot be asked: `reject`
	// (503, the default), or `pass`. With `pass` the name stays one at a time on this Caddy,
	// but not among Caddys.
	OnRedisError string `json:"on_redis_error,omitempty"`

	// What a lock's key in Redis holds: `getset` (the default: the Unix second of its end, by the
	// SETNX/GETSET pattern of Redis's documentation), or `token` (a random token, by the SET NX PX
	// convention: for those who share locks with programs that do it like this).
	Protocol string `json:"protocol,omitempty"`

	// Where the locks live. Default: Redis on 127.0.0.1:6379.
	Redis *Redis `json:"redis,omitempty"`

	// Keep the locks in this process instead of Redis: for a single Caddy. They survive
	// reloads.
	Memory bool `json:"memory,omitempty"`

	// Deliveries that were handled well are not handled again, though their senders repeat them.
	Dedupe *Dedupe `json:"dedupe,omitempty"`

	// Newest wins, as for deploys: at most one request waits for a name. A newer one takes its place,
	// and the one that is displaced is answered with this status, from 200 to 599, at once; those
	// from 400 on go to Caddy's error routes. Who has the lock is never displaced. Needs `wait` and a
	// buffer, and means `on_disconnect stay`. Not with a quorum. Default: 0, all who wait are served.
	Supersede int `json:"supersede,omitempty"`

	logger      *zap.Logger
	backend     backend
	acquire     []lock.AcquireOption
	fields      fields
	fence       fenceHeader
	foreignSeen *rate.Sometimes
	refusedSeen *rate.Sometimes
	holdTime    *holdTime
}

// Dedupe says which requests are the same delivery, sent again. One that was handled well (the whole
// answer of the next handler was 2xx) is answered with 200 from then on, and does not reach the next
// handler. One that failed, or was cut off, may be tried again. While it is handled, the same delivery
// waits in line, or is answered with 409. Redis needs a name's deliveries in one place: not with a quorum.
type Dedupe struct {
	// What tells deliveries to the same lock apart, with placeholders: the sender's header or
	// field for that. A request for which it does not resolve is no delivery.
	ID string `json:"id,omitempty"`

	// For how long a delivery counts as handled. Default: 24h.
	Window caddy.Duration `json:"window,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.redis_lock",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision sets h up. It does not talk to Redis: Caddy starts, reloads and validates its
// configuration while Redis is down.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	h.setDefaults()
	h.fields, _ = newFields(h.templates()) // Validate has the error
	h.fence = fenceHeader(http.CanonicalHeaderKey(h.FenceHeader))
	h.foreignSeen = &rate.Sometimes{Interval: time.Minute}
	h.refusedSeen = &rate.Sometimes{Interval: time.Minute}
	h.holdTime = new(holdTime)
	h.acquire = []lock.AcquireOption{
		lock.Prefix(h.Prefix),
		lock.Lease(time.Duration(h.Lease)),
		lock.Wait(time.Duration(h.Wait)),
		lock.Queue(*h.Queue),
	}
	if h.Supersede != 0 {
		h.acquire = append(h.acquire, lock.Supersede())
	}
	if h.OnRedisError == pass {
		h.acquire = append(h.acquire, lock.OrLocal())
	}
	if h.Memory {
		h.backend = inProcess{}
		return nil
	}
	shared, err := openRedis(h.Redis, h.Protocol)
	if err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	h.backend = shared
	return nil
}

func (h *Handler) setDefaults() {
	if len(h.Name) == 0 {
		h.Name = []string{defaultName}
	}
	if h.OnNoName == "" {
		h.OnNoName = reject
	}
	if len(h.Methods) == 0 {
		h.Methods = []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}
	}
	if h.Lease == 0 {
		h.Lease = caddy.Duration(lock.DefaultLease)
	}
	if h.MaxHold == 0 {
		h.MaxHold = caddy.Duration(defaultMaxHold)
	}
	if h.Buffer == nil {
		h.Buffer = new(int64(defaultBuffer))
	}
	if h.OnDisconnect == "" && h.Supersede != 0 {
		h.OnDisconnect = stayRun // who hangs up must not take the newest with it
	}
	if h.OnDisconnect == "" {
		h.OnDisconnect = finishRun
	}
	if h.OnLost == "" {
		h.OnLost = cancelRun
	}
	if h.Queue == nil {
		h.Queue = new(lock.DefaultQueue)
	}
	if h.Status == 0 {
		h.Status = http.StatusLocked
	}
	if h.Prefix == "" {
		h.Prefix = lock.DefaultPrefix
	}
	if h.OnRedisError == "" {
		h.OnRedisError = reject
	}
	if h.Protocol == "" && !h.Memory {
		h.Protocol = getsetProtocol
	}
	if h.Dedupe != nil && h.Dedupe.Window == 0 {
		h.Dedupe.Window = caddy.Duration(defaultWindow)
	}
	if h.Redis == nil && !h.Memory {
		h.Redis = &Redis{Address: []string{defaultAddress}}
	}
}

// Validate refuses what the Caddyfile refuses while it is adapted, for those who write JSON.
func (h *Handler) Validate() error {
	for _, check := range []struct {
		option string
		err    error
	}{
		{"name", checkNames(h.Name)},
		{"on_no_name", checkOneOf(reject, pass)(h.OnNoName)},
		{"methods", checkMethods(h.Methods)},
		{"lease", lock.CheckLease(time.Duration(h.Lease))},
		{"wait", checkNotNegative(time.Duration(h.Wait))},
		{"queue", checkNotNegative(*h.Queue)},
		{"max_hold", checkPositive(time.Duration(h.MaxHold))},
		{"buffer", h.checkBuffer()},
		{"on_disconnect", checkOneOf(finishRun, stayRun, cancelRun)(h.OnDisconnect)},
		{"on_lost", checkOneOf(cancelRun, continueRun)(h.OnLost)},
		{"fence_header", h.checkFenceHeader()},
		{"status", checkStatus(h.Status)},
		{"prefix", lock.CheckPrefix(h.Prefix)},
		{"on_redis_error", checkOneOf(reject, pass)(h.OnRedisError)},
		{"dedupe", h.checkDedupe()},
		{"supersede", h.checkSupersede()},
		{"protocol", h.checkProtocol()},
		{"redis", h.checkRedis()},
		{"memory", h.checkMemory()},
	} {
		if check.err != nil {
			return fmt.Errorf("%s: %w", check.option, check.err)
		}
	}
	return nil
}

// Cleanup gives up this configuration's share of the connections to Redis. Requests still in
// flight have shares of their own.
func (h *Handler) Cleanup() error {
	if h.backend == nil {
		return nil // Provision failed
	}
	return h.backend.close()
}

// Interface guards
var (
	_ caddy.Module                = (*Handler)(nil)
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.Validator             = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
