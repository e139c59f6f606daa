package lock

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// The scripts say the protocol, put together from parts: see loadGetSetScripts.
//
//go:embed getset/*.lua
var getsetSources embed.FS

// getsetScripts are the operations.
type getsetScripts struct{ acquire, renew, release, inspect, forceRelease *script }

// How scripts tell of a hand-over: by themselves, or by their callers.
const (
	tellNow   = "tell"
	tellLater = "tell_later"
)

var (
	theGetSetScripts     = loadGetSetScripts(tellNow, unedited)
	clusterGetSetScripts = loadGetSetScripts(tellLater, unedited)
)

func unedited(source string) string { return source }

// loadGetSetScripts has edit see the source of each.
func loadGetSetScripts(tell string, edit func(source string) string) *getsetScripts {
	load := func(files ...string) *script {
		var source []byte
		for _, file := range files {
			part, err := getsetSources.ReadFile("getset/" + file + ".lua")
			if err != nil {
				panic(err) // embedded: cannot happen in a program that was built
			}
			source = append(source, part...)
		}
		return newScript(edit(string(source)))
	}
	return &getsetScripts{
		acquire:      load("head", "acquire_free", "state", tell, "line", "acquire"),
		renew:        load("head", "state", "renew"),
		release:      load("head", "release_alone", "state", tell, "line", "release"),
		inspect:      load("head", "state", "inspect"),
		forceRelease: load("head", "state", "force_release"),
	}
}

// getset is the Store of the published SETNX locking pattern, see NewGetSet.
type getset struct {
	servers  *servers
	scripts  *getsetScripts
	messages *messages

	// Why the last acquire failed, if that was for a right that the user lacks; nil after one that was
	// granted.
	denied atomic.Pointer[UnavailableError]
}

// NewGetSet returns a Store that keeps locks in Redis by the published SETNX/GETSET
// locking pattern: the key holds the Unix second at which the lock ends, so that programs
// which speak that pattern share locks with us. Each operation is one script, judged by
// the server's clock, and a holder record beside the key ("{key}:holder") tells owners
// apart: sent command by command, the pattern breaks. Those who wait stand in a line in Redis,
// too ("{key}:line", "{key}:alive"). See docs/protocol.md.
//
// client is that of one server, of a master found by sentinels, or of a cluster. It must not be
// one that reads from replicas. The Store sends an operation a second time after a broken
// connection, which is safe. Give it a client that does not (MaxRetries: -1): when a client
// repeats a Release behind the Store's back, its answer "not the owner" looks like a lost lock.
// It must not have a second pool for pipelines (PipelinePoolSize: -1), which would hide from the Store how
// many connections may be broken. It must honour deadlines (ContextTimeoutEnabled: true). Close closes it.
func NewGetSet(client redis.UniversalClient) Store {
	if _, ok := client.(*redis.ClusterClient); ok {
		return newGetSet(client, clusterGetSetScripts)
	}
	return newGetSet(client, theGetSetScripts)
}

func newGetSet(client redis.UniversalClient, scripts *getsetScripts) *getset {
	return &getset{servers: newServers(client), scripts: scripts, messages: newMessages(client)}
}

func (s *getset) Acquire(ctx context.Context, key string, claim Claim) (Grant, error) {
	const join, onlyLineUp = 1, 2
	var more []int64
	switch {
	case claim.LineUp:
		more = append(more, onlyLineUp)
	case claim.Wait:
		more = append(more, join)
	}
	if claim.Place != 0 {
		more = append(more, claim.Place)
	}
	rep, _, err := s.run(ctx, s.scripts.acquire, key, claim, more...)
	denied := s.denied.Load()
	switch {
	case err != nil:
		if away, ok := errors.AsType[*UnavailableError](err); ok && lacksRight(away.Err) {
			s.denied.Store(away)
		}
		return Grant{}, err
	case rep.why == ForeignHolder && denied != nil:
		// Or rather a key of our own, from a script that was denied its next command.
		return Grant{}, &UnavailableError{Err: denied.Err}
	case rep.why != "":
		s.messages.tell(rep.successor)
		return Grant{}, rep.held()
	case denied != nil:
		s.denied.Store(nil)
	}
	return rep.grant(claim.Lease), nil
}

// lacksRight is true for what Redis says of a command, or of one in a script, that the user may not
// run.
func lacksRight(err error) bool {
	if _, ok := errors.AsType[redis.Error](err); !ok {
		return false
	}
	return slices.ContainsFunc([]string{"NOPERM", "ACL failure", "can't run this command"}, func(phrase string) bool {
		return strings.Contains(err.Error(), phrase)
	})
}

func (s *getset) Renew(ctx context.Context, key string, claim Claim) (Grant, error) {
	rep, _, err := s.run(ctx, s.scripts.renew, key, claim)
	if err != nil {
		return Grant{}, err
	}
	if rep.why != "" {
		return Grant{}, &LostError{Why: rep.why}
	}
	return rep.grant(claim.Lease), nil
}

func (s *getset) Release(ctx context.Context, key string, claim Claim) (Successor, error) {
	rep, resent, err := s.run(ctx, s.scripts.release, key, claim)
	switch {
	case err != nil:
		return Successor{}, err
	case rep.why == NotOwner && resent:
		return Successor{}, nil // the first one, whose reply got lost, did it
	case rep.why != "":
		return Successor{}, &LostError{Why: rep.why}
	case rep.successor == "":
		return Successor{}, nil
	}
	if rep.successor.process() != claim.Token.process() {
		s.messages.tell(rep.successor)
	}
	return Successor{Token: rep.successor, Grant: rep.grant(0)}, nil
}

func (s *getset) Inspect(ctx context.Context, key string) error {
	rep, _, err := s.run(ctx, s.scripts.inspect, key, Claim{})
	if err != nil {
		return err
	}
	if rep.why != "" {
		return rep.held()
	}
	return nil
}

func (s *getset) ForceRelease(ctx context.Context, key string) error {
	_, _, err := s.run(ctx, s.scripts.forceRelease, key, Claim{})
	return err
}

func (s *getset) Shard(key string) string { return s.servers.shard(key) }

func (s *getset) Listen(process Process, listener Listener) { s.messages.listen(process, listener) }

func (s *getset) Close() error {
	s.messages.close()
	return s.servers.close()
}

// run sends one operation. resent tells that an earlier one may have been carried out.
func (s *getset) run(ctx context.Context, script *script, key string, claim Claim, more ...int64) (rep reply, resent bool, err error) {
	raw, resent, err := s.servers.run(ctx, key, newCall(script, key, claim, more))
	if err != nil {
		return reply{}, resent, err
	}
	rep, err = decodeReply(raw)
	if err != nil {
		return reply{}, resent, &UnavailableError{Doubtful: true, Err: err}
	}
	return rep, resent, nil
}

// reply is what a script answers: an integer, of a new lock its fence; or {1, expiry, fence, now}
// and from a release the successor's token; or {0, expiry of the one in the way, now, why} and
// from an acquire place, 1 if it is new, length of the line, and whom the lock was handed over
// to, if it was. Expiries are Unix seconds, now
// is in Unix microseconds, by the server's clock.
type reply struct {
	plain     bool // an integer
	expiry    int64
	fence     int64
	now       int64
	successor Token
	why       Reason // empty: yes
	place     int64
	newPlace  bool
	line      int
}

// ttl is cut off at a century: a foreign program may write any 12 digits.
func (r reply) ttl() time.Duration {
	const century = 100 * 365 * 24 * time.Hour
	us := min(r.expiry*1_000_000-r.now, int64(century/time.Microsecond))
	return time.Duration(us) * time.Microsecond
}

// grant has a new lock last for its lease: whole seconds make that longer, never shorter.
func (r reply) grant(lease time.Duration) Grant {
	if r.plain {
		return Grant{Fence: r.fence, TTL: lease}
	}
	return Grant{Fence: r.fence, TTL: r.ttl()}
}

func (r reply) held() error {
	// The lock is free only strictly after the second that it names.
	return &HeldError{Why: r.why, For: max(0, r.ttl()+time.Second), Place: r.place, NewPlace: r.newPlace, Line: r.line}
}

// decodeReply checks a script's answer, which may come from a proxy or from a server
// that only looks like Redis.
func decodeReply(raw any) (reply, error) {
	if n, ok := raw.(int64); ok && n > 0 {
		return reply{plain: true, fence: n}, nil
	}
	fields, _ := raw.([]any)
	var yes, added, line int64
	var why, successor string
	var r reply
	ok := false
	switch {
	case fit(fields, &yes, &r.expiry, &r.fence, &r.now),
		fit(fields, &yes, &r.expiry, &r.fence, &r.now, &successor):
		ok = yes == 1
	case fit(fields, &yes, &r.expiry, &r.now, &why),
		fit(fields, &yes, &r.expiry, &r.now, &why, &r.place, &added, &line),
		fit(fields, &yes, &r.expiry, &r.now, &why, &r.place, &added, &line, &successor):
		ok = yes == 0 && why != ""
	}
	// No script of ours writes such numbers: a lifetime computed from them would overflow and
	// look like a long one.
	const maxSecond = 1_000_000_000_000 // 12 digits, as acquire.lua accepts
	if !ok || r.expiry < 0 || r.expiry >= maxSecond || r.now <= 0 || r.now/1_000_000 >= maxSecond ||
		r.fence < 0 || r.place < 0 || line < 0 {
		return reply{}, fmt.Errorf("unexpected reply of a lock script: %.100v", raw)
	}
	r.successor, r.why, r.newPlace, r.line = Token(successor), Reason(why), added == 1, int(line)
	return r, nil
}

// fit stores the fields in targets, each an *int64 or a *string; it is false if they do not fit.
func fit(fields []any, targets ...any) bool {
	if len(fields) != len(targets) {
		return false
	}
	for i, target := range targets {
		var ok bool
		switch target := target.(type) {
		case *int64:
			*target, ok = fields[i].(int64)
		case *string:
			*target, ok = fields[i].(string)
		}
		if !ok {
			return false
		}
	}
	return true
}
