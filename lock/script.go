package lock

import (
	"context"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// A script is known to the server by its hash, once it has seen its source.
type script struct {
	hash, source any   // strings; in this form they cost no allocation for each call
	keys         []any // beside those of the lock
}

func newScript(source string) *script {
	return &script{hash: redis.NewScript(source).Hash(), source: source}
}

// A scriptCall is one call of a script for one lock.
type scriptCall struct {
	script                     *script
	holder, line, alive, token string
	handled                    string // empty: the token names no delivery
	lease                      int64
	more                       [2]int64
	since                      age   // of the claim, see newCall
	asking                     bool  // to a server that is about to get the key: see servers.redirect
	args                       []any // of the command: EVALSHA hash number of keys, keys... token lease more...

	// Where it travels with others:
	deadline time.Time
	done     chan struct{} // closed when the answer is there
	raw      any
	err      error
}

// newCall makes a call with the keys of a lock, the claim's token and lease, and at most two
// more arguments, and the age of one that supersedes others. Most of them are passed as pointers into the call, which saves an allocation
// for each; but not the first key, from which a cluster's client computes the slot.
func newCall(script *script, key string, claim Claim, more []int64) *scriptCall {
	c := &scriptCall{script: script, token: string(claim.Token), lease: int64(claim.Lease / time.Second)}
	const holder, line, alive, done = ":holder", ":line", ":alive", ":done:"
	tagged := "{" + key + "}"
	all := tagged + holder + tagged + line + tagged + alive
	c.holder = all[:len(tagged)+len(holder)]
	c.alive = all[len(all)-len(tagged)-len(alive):]
	c.line = all[len(c.holder) : len(all)-len(c.alive)]
	keys := 4 + len(script.keys)
	delivery := claim.Token.delivery()
	if delivery != "" {
		c.handled = tagged + done + delivery
		keys++
	}
	c.args = append(make([]any, 0, 13), "evalsha", script.hash, keys, key, &c.holder, &c.line, &c.alive)
	if delivery != "" {
		c.args = append(c.args, &c.handled)
	}
	c.args = append(c.args, script.keys...)
	c.args = append(c.args, &c.token, &c.lease)
	for i := range more {
		c.more[i] = more[i]
		c.args = append(c.args, &c.more[i])
	}
	if claim.Token.supersedes() && len(more) == 2 {
		c.since = age(claim.Since)
		c.args = append(c.args, &c.since)
	}
	return c
}

// An age is sent as the microseconds that have passed since then, when the call goes out: it may
// have waited for a connection, or for others.
type age time.Time

// MarshalBinary is what the client calls to write an argument.
func (a *age) MarshalBinary() ([]byte, error) {
	var passed time.Duration
	if since := time.Time(*a); !since.IsZero() {
		passed = time.Since(since)
	}
	return strconv.AppendInt(nil, passed.Microseconds(), 10), nil
}

func (c *scriptCall) command(ctx context.Context) *redis.Cmd {
	cmd := redis.NewCmd(ctx, c.args...)
	cmd.SetFirstKeyPos(3)
	return cmd
}

// isUnknown is true if the server said that it does not know the script's hash. From then on the
// call has the source instead.
func (c *scriptCall) isUnknown(err error) bool {
	if !redis.HasErrorPrefix(err, "NOSCRIPT") {
		return false
	}
	c.args[0], c.args[1] = "eval", c.script.source
	return true
}

// alone sends the call by itself.
func (c *scriptCall) alone(ctx context.Context, client redis.UniversalClient) (any, error) {
	if c.asking {
		together(ctx, client, []*scriptCall{c})
		return c.raw, c.err
	}
	cmd := c.command(ctx)
	err := client.Process(ctx, cmd)
	if c.isUnknown(err) {
		cmd = c.command(ctx)
		err = client.Process(ctx, cmd)
	}
	return cmd.Val(), err
}
