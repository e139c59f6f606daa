package lock

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// The scripts say the protocol; state.lua is the beginning of each.
//
//go:embed getset/*.lua
var getsetSources embed.FS

var (
	acquireScript      = getsetScript("acquire")
	renewScript        = getsetScript("renew")
	releaseScript      = getsetScript("release")
	inspectScript      = getsetScript("inspect")
	forceReleaseScript = getsetScript("force_release")
)

func getsetScript(name string) *redis.Script {
	var source []byte
	for _, file := range []string{"state", name} {
		part, err := getsetSources.ReadFile("getset/" + file + ".lua")
		if err != nil {
			panic(err) // embedded: cannot happen in a program that was built
		}
		source = append(source, part...)
	}
	return redis.NewScript(string(source))
}

const (
	// grace is how long after the lock's end its key is collected as garbage. Two
	// seconds is the least that keeps exclusion: a key must not vanish before it has
	// expired for everybody.
	grace = 2 * time.Second

	// minHolderTTL is how long a holder record stays at least. It bounds the backward
	// step of the server's clock that the fence survives, and the memory that a flood
	// of names takes.
	minHolderTTL = 10 * time.Minute
)

// getset is the Store of the published SETNX locking pattern, see NewGetSet.
type getset struct {
	client   redis.UniversalClient
	renewals batcher
}

// NewGetSet returns a Store that keeps locks in Redis by the published SETNX/GETSET
// locking pattern: the key holds the Unix second at which the lock ends, so that programs
// which speak that pattern share locks with us. Each operation is one script, judged by
// the server's clock, and a holder record beside the key ("{key}:holder") tells owners
// apart: sent command by command, the pattern breaks (see docs/protocol.md).
//
// The Store sends an operation a second time after a broken connection, which is safe.
// Give it a client that does not (MaxRetries: -1): when a client repeats a Release behind
// the Store's back, its answer "not the owner" looks like a lost lock. The client must
// honour deadlines (ContextTimeoutEnabled: true). Close closes it.
func NewGetSet(client redis.UniversalClient) Store {
	return &getset{client: client, renewals: batcher{client: client}}
}

func (s *getset) Acquire(ctx context.Context, key string, token Token, lease time.Duration) (Grant, error) {
	rep, _, err := s.run(ctx, s.send, acquireScript, key, leaseArgs(token, lease)...)
	if err != nil {
		return Grant{}, err
	}
	if rep.why != "" {
		return Grant{}, rep.held()
	}
	return rep.grant(), nil
}

func (s *getset) Renew(ctx context.Context, key string, token Token, lease time.Duration) (Grant, error) {
	// Renewals that fall due together go together.
	rep, _, err := s.run(ctx, s.renewals.run, renewScript, key, leaseArgs(token, lease)...)
	if err != nil {
		return Grant{}, err
	}
	if rep.why != "" {
		return Grant{}, &LostError{Why: rep.why}
	}
	return rep.grant(), nil
}

func (s *getset) Release(ctx context.Context, key string, token Token) error {
	rep, resent, err := s.run(ctx, s.send, releaseScript, key, string(token))
	if err != nil {
		return err
	}
	if rep.why == NotOwner && resent {
		return nil // the first one, whose reply got lost, did it
	}
	if rep.why != "" {
		return &LostError{Why: rep.why}
	}
	return nil
}

func (s *getset) Inspect(ctx context.Context, key string) error {
	rep, _, err := s.run(ctx, s.send, inspectScript, key, "")
	if err != nil {
		return err
	}
	if rep.why != "" {
		return rep.held()
	}
	return nil
}

func (s *getset) ForceRelease(ctx context.Context, key string) error {
	_, _, err := s.run(ctx, s.send, forceReleaseScript, key, "")
	return err
}

func (s *getset) Close() error {
	s.renewals.close()
	return s.client.Close()
}

func leaseArgs(token Token, lease time.Duration) []any {
	holderTTL := max(minHolderTTL, 2*(lease+time.Second+grace))
	return []any{
		string(token),
		int64(lease / time.Second),
		int64(grace / time.Second),
		int64(holderTTL / time.Second),
	}
}

// A sender calls a script. sent is false if the server cannot have heard of it.
type sender func(ctx context.Context, script *redis.Script, keys []string, args []any) (raw any, sent bool, err error)

// send calls a script on its own.
func (s *getset) send(ctx context.Context, script *redis.Script, keys []string, args []any) (any, bool, error) {
	raw, err := script.Run(ctx, s.client, keys, args...).Result()
	return raw, true, err
}

// run sends one operation, and again if its connection broke: that a server was restarted, or
// closes idle connections, is found out only by writing to it, once for each connection of the
// pool. resent tells that an earlier one may have been carried out.
func (s *getset) run(ctx context.Context, send sender, script *redis.Script, key string, args ...any) (rep reply, resent bool, err error) {
	keys := []string{key, "{" + key + "}:holder"}
	raw, sent, err := send(ctx, script, keys, args)
	for tries := s.client.PoolStats().IdleConns + 1; tries > 0 && brokenConnection(err) && ctx.Err() == nil; tries-- {
		resent = true
		raw, _, err = send(ctx, script, keys, args)
	}
	if err != nil {
		return reply{}, resent, &UnavailableError{Doubtful: resent || sent && mayHaveRun(err), Err: err}
	}
	rep, err = decodeReply(raw)
	if err != nil {
		return reply{}, resent, &UnavailableError{Doubtful: true, Err: err}
	}
	return rep, resent, nil
}

// brokenConnection is true for an error of an established connection that is not a
// time-out and not an answer of the server.
func brokenConnection(err error) bool {
	if err == nil || neverSent(err) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		errors.Is(err, redis.ErrClosed) {
		return false
	}
	if _, ok := errors.AsType[redis.Error](err); ok {
		return false
	}
	timeout, ok := errors.AsType[net.Error](err)
	return !ok || !timeout.Timeout()
}

// mayHaveRun is false if the server cannot have run the script, or has said that it did
// not. Any other error may come from within the script, whose first commands stay, or from a
// proxy that had sent the script on.
func mayHaveRun(err error) bool {
	if neverSent(err) {
		return false
	}
	answer, ok := errors.AsType[redis.Error](err)
	if !ok {
		return true
	}
	message := answer.Error()
	if strings.Contains(message, "script") {
		return true
	}
	return !slices.ContainsFunc(refusals, func(refusal string) bool { return strings.HasPrefix(message, refusal) })
}

// refusals begin the answers by which Redis refuses a command before it runs.
var refusals = []string{
	"NOAUTH ", "WRONGPASS ", "NOPERM ", "READONLY ", "LOADING ", "MASTERDOWN ", "CLUSTERDOWN ",
	"MOVED ", "ASK ", "TRYAGAIN ", "ERR max number of clients reached", "DENIED ",
}

// neverSent is true if no connection came about, so that the server cannot have heard of
// the operation.
func neverSent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

// reply is what a script answers: {1, expiry, fence, now} or {0, expiry of the one in the
// way, now, why}; expiries in Unix seconds, now in Unix microseconds, by the server's clock.
type reply struct {
	expiry int64
	fence  int64
	now    int64
	why    Reason // empty: yes
}

// ttl is cut off at a century: a foreign program may write any 12 digits.
func (r reply) ttl() time.Duration {
	const century = 100 * 365 * 24 * time.Hour
	us := min(r.expiry*1_000_000-r.now, int64(century/time.Microsecond))
	return time.Duration(us) * time.Microsecond
}

func (r reply) grant() Grant { return Grant{Fence: r.fence, TTL: r.ttl()} }

func (r reply) held() error {
	// The lock is free only strictly after the second that it names.
	return &HeldError{Why: r.why, For: max(0, r.ttl()+time.Second)}
}

// decodeReply checks a script's answer, which may come from a proxy or from a server
// that only looks like Redis.
func decodeReply(raw any) (reply, error) {
	unexpected := fmt.Errorf("unexpected reply of a lock script: %.100v", raw)
	fields, ok := raw.([]any)
	if !ok || len(fields) != 4 {
		return reply{}, unexpected
	}
	var n [3]int64
	for i := range n {
		if n[i], ok = fields[i].(int64); !ok {
			return reply{}, unexpected
		}
	}
	switch n[0] {
	case 1:
		now, ok := fields[3].(int64)
		if !ok {
			return reply{}, unexpected
		}
		return checked(reply{expiry: n[1], fence: n[2], now: now}, unexpected)
	case 0:
		why, ok := fields[3].(string)
		if !ok || why == "" {
			return reply{}, unexpected
		}
		return checked(reply{expiry: n[1], now: n[2], why: Reason(why)}, unexpected)
	}
	return reply{}, unexpected
}

// checked refuses numbers that no script of ours writes: a lifetime computed from them
// would overflow and look like a long one.
func checked(r reply, unexpected error) (reply, error) {
	const maxSecond = 1_000_000_000_000 // 12 digits, as acquire.lua accepts
	if r.expiry < 0 || r.expiry >= maxSecond || r.now <= 0 || r.now/1_000_000 >= maxSecond || r.fence < 0 {
		return reply{}, unexpected
	}
	return r, nil
}
