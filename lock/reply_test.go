package lock

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestRepliesThatNoScriptWrites(t *testing.T) {
	for _, raw := range []any{
		nil, int64(0), int64(-1), "OK", []any{}, []any{int64(1)},
		[]any{int64(1), int64(2)},
		[]any{int64(1), int64(2), "held"},
		[]any{int64(1), int64(2), "3", "token"},
		[]any{int64(0), int64(2), ""},
		[]any{int64(0), int64(2), int64(3)},
		[]any{int64(2), int64(2), int64(3)},
		[]any{int64(1), int64(-2), int64(3)},
		[]any{int64(1), int64(1e15 + 1), int64(3)},
		[]any{int64(1), int64(2), int64(-3)},
		[]any{int64(1), int64(2), int64(3), int64(4)},
		[]any{int64(1), int64(2), int64(3), "token", int64(5)},
		[]any{int64(0), int64(2), int64(3), "token"},
		[]any{int64(0), int64(2), "held", int64(-1), int64(0), int64(0)},
		[]any{int64(0), int64(2), "held", int64(1), int64(0), int64(-1)},
		[]any{int64(1), int64(2), "held", int64(1), int64(0), int64(1)},
	} {
		if r, err := decodeReply(raw); err == nil {
			t.Errorf("%v was taken for %+v", raw, r)
		}
	}
}

// FuzzReply: whatever answers in Redis's place, a reply is an error or makes sense.
func FuzzReply(f *testing.F) {
	f.Add(int64(1), int64(30_000_000), int64(1_800_000_000_000_000), "")
	f.Add(int64(0), int64(30_000_000), int64(0), "held")
	f.Add(int64(0), int64(1e15), int64(0), "held")
	f.Fuzz(func(t *testing.T, ok, left, fence int64, why string) {
		raw := []any{ok, left, fence}
		if why != "" {
			raw[2] = why
		}
		r, err := decodeReply(raw)
		if err != nil {
			return
		}
		const longest = 1e15 * time.Microsecond
		if r.why == "" {
			if g := r.grant(0); ok != 1 || g.Fence < 0 || g.TTL < 0 || g.TTL > longest {
				t.Errorf("%v was taken for %+v", raw, g)
			}
			return
		}
		if held, isHeld := r.refusal().(*HeldError); isHeld && (ok != 0 || held.For < 0 || held.For > longest) {
			t.Errorf("%v was taken for %+v", raw, held)
		}
	})
}

func TestErrorsThatMayHaveRunTheScript(t *testing.T) {
	for _, c := range []struct {
		message string
		run     bool
	}{
		{"NOAUTH Authentication required.", false},
		{"READONLY You can't write against a read only replica.", false},
		{"LOADING Redis is loading the dataset in memory", false},
		{"NOPERM this user has no permissions to access one of the keys used as arguments script: 5a, on @user_script:70.", true},
		{"MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.", false},
		{"READONLY You can't write against a read only replica. script: 5a, on @user_script:44.", false},
		{"upstream failure", true}, // of a proxy
		{"MOVED 3999 127.0.0.1:6381", false},
		{"ERR Error running script (call to f_5a): @user_script:70: -OOM command not allowed", false},
		{"ERR Error running script (call to f_5a): @user_script:70: user_script:12: bug", true},
	} {
		if run := mayHaveRun(redisError(c.message)); run != c.run {
			t.Errorf("%q: may have run %v, want %v", c.message, run, c.run)
		}
	}
}

type redisError string

func (e redisError) Error() string { return string(e) }
func (redisError) RedisError()     {}

var _ redis.Error = redisError("")
