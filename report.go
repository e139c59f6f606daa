package redislock

import (
	"math"
	"net/http"
	"strconv"
	"sync/atomic"
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

	outcomeDuplicate  = "duplicate"
	outcomeSuperseded = "superseded"
)

// report tells what became of a request: to placeholders and to the access log.
type report struct {
	repl  *caddy.Replacer
	extra *caddyhttp.ExtraLogFields
}

// reported are the placeholders {http.redis_lock.*} that a report sets.
var reported = []string{"name", "fence", "waited", "outcome", "retry_after"}

func newReport(r *http.Request, repl *caddy.Replacer) report {
	p := report{repl: repl}
	p.extra, _ = r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields)
	for _, placeholder := range reported {
		p.repl.Set("http.redis_lock."+placeholder, "")
	}
	return p
}

func (p report) name(name string) {
	p.repl.Set("http.redis_lock.name", name)
	p.log(zap.String("redis_lock_name", logged(name)))
}

// longestLogged bounds what of a name is logged as it is: it may come from a body, and be as long.
const longestLogged = 500

func logged(name string) string {
	if len(name) > longestLogged {
		return lock.Key("", name)
	}
	return name
}

func nameField(name string) zap.Field { return zap.String("name", logged(name)) }

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
	if fence := held.Fence(); fence != 0 { // a quorum has none
		p.repl.Set("http.redis_lock.fence", strconv.FormatInt(fence, 10))
	}
}

// retryLater is an error with a Retry-After header, which survives Caddy's error routes.
func (p report) retryLater(w http.ResponseWriter, status int, after time.Duration, err error) error {
	seconds := strconv.Itoa(max(1, int(math.Ceil(after.Seconds()))))
	w.Header().Set("Retry-After", seconds)
	p.repl.Set("http.redis_lock.retry_after", seconds)
	return caddyhttp.Error(status, err)
}

// cutOff is the error for a request whose handlers were cut off before they answered.
func (p report) cutOff(w http.ResponseWriter, reason error) error {
	if reason == errMaxHold {
		return caddyhttp.Error(http.StatusGatewayTimeout, reason)
	}
	return p.retryLater(w, http.StatusServiceUnavailable, 0, reason)
}

// holdTime is how long requests kept the lock of late: a moving average, in which each counts for
// an eighth. The first counts whole.
type holdTime struct{ average atomic.Int64 }

func (t *holdTime) add(held time.Duration) {
	for {
		old := t.average.Load()
		next := int64(held)
		if old != 0 {
			next = old + (int64(held)-old)/8
		}
		if t.average.CompareAndSwap(old, max(1, next)) {
			return
		}
	}
}

// after estimates when it is a newcomer's turn behind the one who holds the lock and a line.
func (t *holdTime) after(line int) time.Duration {
	return time.Duration(t.average.Load()) * time.Duration(line+1)
}

func (p report) log(field zap.Field) {
	if p.extra != nil {
		p.extra.Set(field)
	}
}
