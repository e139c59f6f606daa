package lock

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// The scripts say the protocols, put together from parts: see loadScripts.
//
//go:embed scripts
var scriptSources embed.FS

// A protocol is by which rules a lock's key is read and written: a directory of scripts.
type protocol string

const (
	getsetProtocol protocol = "getset"
	tokenProtocol  protocol = "token"
)

// scripts are the operations of a protocol.
type scripts struct {
	acquire, renew, release, inspect, forceRelease *script

	mark *script // of a node of a quorum
}

// How scripts tell of a hand-over: by themselves, or by their callers.
const (
	tellNow   = "tell"
	tellLater = "tell_later"
)

var (
	getsetScripts        = loadScripts(getsetProtocol, tellNow, unedited)
	clusterGetsetScripts = loadScripts(getsetProtocol, tellLater, unedited)
	tokenScripts         = loadScripts(tokenProtocol, tellNow, unedited)
	clusterTokenScripts  = loadScripts(tokenProtocol, tellLater, unedited)
	nodeScripts          = getsetScripts.withMarker()
)

func unedited(source string) string { return source }

// loadScripts has edit see the source of each. Where the protocols differ, a part is in the
// protocol's directory; what is the same for all, above it.
func loadScripts(p protocol, tell string, edit func(source string) string) *scripts {
	own := func(file string) string { return string(p) + "/" + file }
	load := func(files ...string) *script {
		var source string
		for _, file := range files {
			source += scriptPart(file)
		}
		return newScript(edit(source))
	}
	key, rules := own("key"), own("rules")
	return &scripts{
		acquire:      load(key, "head", own("acquire_free"), "state", rules, tell, "line", "delivery", "acquire"),
		renew:        load(key, "head", "state", rules, "renew"),
		release:      load(key, "head", "done", own("release_alone"), "state", rules, tell, "line", "release"),
		inspect:      load(key, "head", "state", rules, "delivery", "inspect"),
		forceRelease: load(key, "head", "force_release"),
	}
}

func scriptPart(file string) string {
	part, err := scriptSources.ReadFile("scripts/" + file + ".lua")
	if err != nil {
		panic(err) // embedded: cannot happen in a program that was built
	}
	return string(part)
}

const markerKey = "{redis_lock}:since"

// withMarker has a node refuse what would be its vote, see marker.lua.
func (s scripts) withMarker() *scripts {
	for _, vote := range []**script{&s.acquire, &s.renew} {
		*vote = newScript(scriptPart("marker") + (*vote).source.(string))
		(*vote).keys = []any{markerKey}
	}
	s.mark = newScript(scriptPart("marker") + "return 1\n")
	s.mark.keys = []any{markerKey}
	return &s
}

// redisStore is a Store that runs the scripts of a protocol, see NewGetSet and NewToken.
type redisStore struct {
	servers  *servers
	scripts  *scripts
	messages *messages

	// The keys for which an acquire failed in the middle of its script, for a right that the user
	// lacks; nil after one that was granted.
	denied atomic.Pointer[map[string]denial]
}

// A denial is why a key may look like that of a foreign holder, and until when.
type denial struct {
	err   error
	until time.Time
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
// It must not have a second pool for pipelines (PipelinePoolSize: -1), which would hide from the
// Store how many connections may be broken. It must honour deadlines (ContextTimeoutEnabled:
// true). Close closes it.
func NewGetSet(client redis.UniversalClient) Store {
	if _, ok := client.(*redis.ClusterClient); ok {
		return newRedisStore(client, clusterGetsetScripts)
	}
	return newRedisStore(client, getsetScripts)
}

// NewToken returns a Store that keeps locks in Redis by the convention of most programs that lock
// there: the key holds its holder's random token and ends with the lock (SET key token NX PX
// lease), and whoever gives it back compares the token first. Programs of that convention share
// locks with us. Fence and line are beside the key, as with [NewGetSet], which also says what the
// client must be like.
//
// Here the key alone decides: one that is deleted or evicted frees its lock at once, while its
// holder still runs, where [NewGetSet] keeps the others out. Choose it for the sake of programs
// that lock like this already. See docs/protocol.md.
func NewToken(client redis.UniversalClient) Store {
	if _, ok := client.(*redis.ClusterClient); ok {
		return newRedisStore(client, clusterTokenScripts)
	}
	return newRedisStore(client, tokenScripts)
}

// NewGetSetNode returns a Store like that of [NewGetSet] for one node of [NewQuorum]: a Redis that
// came up without what it knew, or was flushed, refuses ([Restarted]) for the claim's lease and 2
// seconds. It finds out by a key of its own ("{redis_lock}:since"), which no lock's key can be: these
// have no braces, and what stands beside them ends otherwise.
func NewGetSetNode(client redis.UniversalClient) Store {
	return nodeStore{newRedisStore(client, nodeScripts)}
}

// A nodeStore is what NewGetSetNode returns.
type nodeStore struct{ *redisStore }

// mark has the server note when it was seen first, if that is now.
func (s nodeStore) mark(ctx context.Context) error {
	_, _, err := s.servers.run(ctx, markerKey, newCall(s.scripts.mark, markerKey, Claim{}, nil))
	return err
}

func newRedisStore(client redis.UniversalClient, scripts *scripts) *redisStore {
	return &redisStore{servers: newServers(client), scripts: scripts, messages: newMessages(client)}
}

func (s *redisStore) Acquire(ctx context.Context, key string, claim Claim) (Grant, error) {
	const join, onlyLineUp = 1, 2
	var more []int64
	switch {
	case claim.LineUp:
		more = append(more, onlyLineUp)
	case claim.Wait:
		more = append(more, join)
	}
	if claim.Token.supersedes() && len(more) > 0 {
		more = append(more, claim.Place)
	} else if claim.Place != 0 {
		more = append(more, claim.Place)
	}
	rep, _, err := s.run(ctx, s.scripts.acquire, key, claim, more...)
	denied := s.denied.Load()
	switch {
	case err != nil:
		s.noteDenial(key, claim, err)
		return Grant{}, err
	case rep.why == ForeignHolder && denied != nil && time.Now().Before((*denied)[key].until):
		// Or rather a key of our own, from a script that was denied its next command.
		return Grant{}, &UnavailableError{Err: (*denied)[key].err}
	case rep.why != "":
		s.messages.tell(rep.told...)
		return Grant{}, rep.refusal()
	case denied != nil:
		s.denied.Store(nil)
	}
	s.messages.tell(rep.told...)
	return rep.grant(claim.Lease), nil
}

// noteDenial remembers the keys that a script may have left without an owner.
func (s *redisStore) noteDenial(key string, claim Claim, err error) {
	away, ok := errors.AsType[*UnavailableError](err)
	if !ok || !lacksRight(away.Err) || !away.Doubtful {
		return
	}
	now := time.Now()
	all := map[string]denial{key: {away.Err, now.Add(claim.Lease + 2*time.Second)}}
	if before := s.denied.Load(); before != nil {
		for key, d := range *before {
			if now.Before(d.until) && len(all) < maxDenied {
				all[key] = d
			}
		}
	}
	s.denied.Store(&all)
}

// maxDenied bounds what is remembered: while the user lacks a right, nothing can be locked anyway.
const maxDenied = 1000

func (s *redisStore) Renew(ctx context.Context, key string, claim Claim) (Grant, error) {
	rep, _, err := s.run(ctx, s.scripts.renew, key, claim)
	if err != nil {
		return Grant{}, err
	}
	if rep.why != "" {
		return Grant{}, &LostError{Why: rep.why}
	}
	return rep.grant(claim.Lease), nil
}

func (s *redisStore) Release(ctx context.Context, key string, claim Claim) (Successor, error) {
	var more []int64
	if claim.Done > 0 && claim.Token.delivery() != "" {
		more = append(more, max(1, claim.Done.Milliseconds()))
	}
	rep, resent, err := s.run(ctx, s.scripts.release, key, claim, more...)
	switch {
	case err != nil:
		return Successor{}, err
	case rep.why == NotOwner && resent:
		return Successor{}, nil // the first one, whose reply got lost, did it
	case rep.why != "":
		return Successor{}, &LostError{Why: rep.why}
	case len(rep.told) == 0:
		return Successor{}, nil
	}
	next := rep.told[0]
	if next.process() != claim.Token.process() {
		s.messages.tell(next)
	}
	return Successor{Token: next, Grant: rep.grant(0)}, nil
}

func (s *redisStore) Inspect(ctx context.Context, key string, token Token) error {
	rep, _, err := s.run(ctx, s.scripts.inspect, key, Claim{Token: token})
	if err != nil {
		return err
	}
	if rep.why != "" {
		return rep.refusal()
	}
	return nil
}

func (s *redisStore) ForceRelease(ctx context.Context, key string) error {
	_, _, err := s.run(ctx, s.scripts.forceRelease, key, Claim{})
	return err
}

func (s *redisStore) Shard(key string) string { return s.servers.shard(key) }

func (s *redisStore) Listen(process Process, listener Listener) { s.messages.listen(process, listener) }

func (s *redisStore) Close() error {
	s.messages.close()
	return s.servers.close()
}

// run sends one operation. resent tells that an earlier one may have been carried out.
func (s *redisStore) run(ctx context.Context, script *script, key string, claim Claim, more ...int64) (rep reply, resent bool, err error) {
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

// reply is what a script answers: an integer, of a new lock its fence; or {1, left, fence}
// and, by spaces, the tokens that are to hear of it (of a release, the successor's); or {0, left of
// the one in the way, why} and from an acquire place, 1 if it is new, length of the line, and such
// tokens. left is for how long, in microseconds.
type reply struct {
	plain    bool // an integer
	left     int64
	fence    int64
	told     []Token
	why      Reason // empty: yes
	place    int64
	newPlace bool
	line     int
}

// Answers of scripts in place of a Reason.
const (
	saysDone       Reason = "done"
	saysSuperseded Reason = "superseded"
)

func (r reply) ttl() time.Duration { return time.Duration(r.left) * time.Microsecond }

// grant has a new lock last for its lease: whole seconds make that longer, never shorter.
func (r reply) grant(lease time.Duration) Grant {
	if r.plain {
		return Grant{Fence: r.fence, TTL: lease}
	}
	return Grant{Fence: r.fence, TTL: r.ttl()}
}

// refusal is the error of an acquire that was refused.
func (r reply) refusal() error {
	switch r.why {
	case saysDone:
		return ErrDone
	case saysSuperseded:
		return ErrSuperseded
	}
	return &HeldError{Why: r.why, For: r.ttl(), Place: r.place, NewPlace: r.newPlace, Line: r.line}
}

// decodeReply checks a script's answer, which may come from a proxy or from a server
// that only looks like Redis.
func decodeReply(raw any) (reply, error) {
	if n, ok := raw.(int64); ok && n > 0 {
		return reply{plain: true, fence: n}, nil
	}
	fields, _ := raw.([]any)
	var yes, added, line int64
	var why, told string
	var r reply
	ok := false
	switch {
	case fit(fields, &yes, &r.left, &r.fence),
		fit(fields, &yes, &r.left, &r.fence, &told):
		ok = yes == 1
	case fit(fields, &yes, &r.left, &why),
		fit(fields, &yes, &r.left, &why, &r.place, &added, &line),
		fit(fields, &yes, &r.left, &why, &r.place, &added, &line, &told):
		ok = yes == 0 && why != ""
	}
	const maxLeft = 1e15 // as state.lua has it; far more would overflow
	if !ok || r.left < 0 || r.left > maxLeft || r.fence < 0 || r.place < 0 || line < 0 {
		return reply{}, fmt.Errorf("unexpected reply of a lock script: %.100v", raw)
	}
	for token := range strings.FieldsSeq(told) {
		r.told = append(r.told, Token(token))
	}
	r.why, r.newPlace, r.line = Reason(why), added == 1, int(line)
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
