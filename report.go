package redislock

import (
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

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
	outcomeMaxHold  = "max_hold"
	outcomePassed   = "passed"
)

// retryAfter is what a refused client is told, in seconds.
const retryAfter = 1

// report tells what became of a request: to placeholders and to the access log.
type report struct {
	repl  *caddy.Replacer
	extra *caddyhttp.ExtraLogFields
}

func newReport(r *http.Request, repl *caddy.Replacer) report {
	p := report{repl: repl}
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

func (p report) taken(held *lock.Handle) {
	if held.Local() {
		p.outcome(outcomePassed)
		return
	}
	p.outcome(outcomeAcquired)
	p.repl.Set("http.redis_lock.fence", strconv.FormatInt(held.Fence(), 10))
}

// retryLater is an error with a Retry-After header, which survives Caddy's error routes.
func (p report) retryLater(w http.ResponseWriter, status int, err error) error {
	seconds := strconv.Itoa(retryAfter)
	w.Header().Set("Retry-After", seconds)
	p.repl.Set("http.redis_lock.retry_after", seconds)
	return caddyhttp.Error(status, err)
}

// cutOff is the error for a request whose handlers were cut off before they answered.
func (p report) cutOff(w http.ResponseWriter, reason error) error {
	if reason == errMaxHold {
		return caddyhttp.Error(http.StatusGatewayTimeout, reason)
	}
	return p.retryLater(w, http.StatusServiceUnavailable, reason)
}

func (p report) log(field zap.Field) {
	if p.extra != nil {
		p.extra.Set(field)
	}
}
