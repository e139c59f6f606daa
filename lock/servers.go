package lock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// servers are where calls go: to one server, or in a cluster to the master that has the key. Each
// has a batcher of its own, so that one that hangs keeps only its own callers waiting.
type servers struct {
	client  redis.UniversalClient
	cluster *redis.ClusterClient // client, if it is one

	only batcher // of the one server

	mu     sync.Mutex
	byNode map[*redis.Client]*batcher // in a cluster
}

func newServers(client redis.UniversalClient) *servers {
	s := &servers{client: client, only: batcher{client: client}, byNode: make(map[*redis.Client]*batcher)}
	if cluster, ok := client.(*redis.ClusterClient); ok {
		s.cluster = cluster
		cluster.OnNewNode(func(node *redis.Client) { node.AddHook(markDialing{}) })
	} else {
		client.AddHook(markDialing{})
	}
	return s
}

// tryAgain is the pause before a call that a cluster has put off is sent again: its slot is being
// moved to another server.
const tryAgain = 20 * time.Millisecond

// run sends a call, and again where that is safe and helps: if the connection broke (that a
// server was restarted, or closes idle connections, is found out only by writing to it, once for
// each connection of the pool), or if the key has moved to another server. resent tells that an
// earlier one may have been carried out.
func (s *servers) run(ctx context.Context, key string, call *scriptCall) (raw any, resent bool, err error) {
	tries, sent := -1, false
	for {
		var way *batcher
		if way, err = s.of(ctx, key); err != nil {
			return nil, resent, &UnavailableError{Doubtful: resent, Err: err}
		}
		call.asking = false
		raw, sent, err = way.run(ctx, call)
		if err != nil && tries < 0 {
			tries = int(way.client.PoolStats().IdleConns) + 1
		}
		if other := s.redirect(ctx, err); other != nil {
			call.asking = redis.HasErrorPrefix(err, "ASK ")
			raw, sent, err = other.run(ctx, call)
		}
		switch {
		case err == nil:
			return raw, resent, nil
		case putOff(err) && s.cluster != nil && ctx.Err() == nil && pause(ctx, tryAgain):
		case brokenConnection(err) && tries > 0 && ctx.Err() == nil:
			tries--
			resent = true
		default:
			if s.cluster != nil {
				s.cluster.ReloadState(ctx) // somebody else may be the key's master by now
			}
			return nil, resent, &UnavailableError{Doubtful: resent || sent && mayHaveRun(err), ThisKey: aboutKey(err), Err: err}
		}
	}
}

// putOff is true for an answer of a cluster that is another one soon: the key's slot is being
// moved, or was moved to a node that is not known yet.
func putOff(err error) bool {
	return redis.HasErrorPrefix(err, "TRYAGAIN") || redis.HasErrorPrefix(err, "MOVED ") || redis.HasErrorPrefix(err, "ASK ")
}

// redirect returns the way to the server that an answer names in place of the one that gave it;
// nil if it names none, or one that is not known yet.
func (s *servers) redirect(ctx context.Context, err error) *batcher {
	if s.cluster == nil || !redis.HasErrorPrefix(err, "MOVED ") && !redis.HasErrorPrefix(err, "ASK ") {
		return nil
	}
	s.cluster.ReloadState(ctx)
	address := err.Error()[strings.LastIndex(err.Error(), " ")+1:]
	var mu sync.Mutex
	var named *redis.Client
	_ = s.cluster.ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
		if node.Options().Addr == address {
			mu.Lock()
			defer mu.Unlock()
			named = node
		}
		return nil
	})
	if named == nil {
		return nil
	}
	return s.to(named)
}

// pause waits for about d; it is false if ctx would end before that.
func pause(ctx context.Context, d time.Duration) bool {
	d = d/2 + rand.N(d)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < d {
		return false
	}
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// of returns the way to the server that has key.
func (s *servers) of(ctx context.Context, key string) (*batcher, error) {
	if s.cluster == nil {
		return &s.only, nil
	}
	node, err := s.cluster.MasterForKey(ctx, key)
	if err != nil {
		return nil, err
	}
	return s.to(node), nil
}

func (s *servers) to(node *redis.Client) *batcher {
	s.mu.Lock()
	defer s.mu.Unlock()
	way := s.byNode[node]
	if way == nil {
		way = &batcher{client: node}
		s.byNode[node] = way
	}
	return way
}

// shard names the server that has key, in a cluster, as far as is known without asking.
func (s *servers) shard(key string) string {
	if s.cluster == nil {
		return ""
	}
	node, err := s.cluster.MasterForKey(noTime, key)
	if err != nil {
		return ""
	}
	return node.Options().Addr
}

var noTime = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// close waits until nothing is under way, and closes the connections.
func (s *servers) close() error {
	s.only.close()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, way := range s.byNode {
		way.close()
	}
	return s.client.Close()
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
	switch {
	case containsAny(message, refusedWrites):
		return false
	case strings.Contains(message, "script"):
		return true
	}
	return !slices.ContainsFunc(refusals, func(refusal string) bool { return strings.HasPrefix(message, refusal) })
}

// refusals begin the answers by which Redis refuses a command before it runs.
var refusals = []string{
	"NOAUTH ", "WRONGPASS ", "NOPERM ", "READONLY ", "LOADING ", "MASTERDOWN ", "CLUSTERDOWN ",
	"MOVED ", "ASK ", "TRYAGAIN ", "ERR max number of clients reached", "DENIED ",
}

// refusedWrites are in the answers by which Redis refuses to write at all: it refuses the first
// write of a script, or none.
var refusedWrites = []string{"READONLY ", "OOM ", "MISCONF ", "NOREPLICAS "}

// aboutKey is true for what Redis says of one key, and not of itself or of the user: it has another
// type, is on its way to another server, or is out of bounds for the user.
func aboutKey(err error) bool {
	if _, ok := errors.AsType[redis.Error](err); !ok {
		return false
	}
	message := err.Error()
	return containsAny(message, []string{"WRONGTYPE ", "TRYAGAIN "}) || lacksRight(err) && strings.Contains(message, " key")
}

func containsAny(message string, phrases []string) bool {
	return slices.ContainsFunc(phrases, func(phrase string) bool { return strings.Contains(message, phrase) })
}

// lacksRight is true for what Redis says of a command, or of one in a script, that the user may
// not run.
func lacksRight(err error) bool {
	if _, ok := errors.AsType[redis.Error](err); !ok {
		return false
	}
	return containsAny(err.Error(), []string{"NOPERM", "ACL failure", "can't run this command", "can't access at least one of the keys"})
}

// neverSent is true if no connection came about, so that the server cannot have heard of
// the operation.
func neverSent(err error) bool {
	_, ok := errors.AsType[*dialError](err)
	return ok
}

// A dialError is why a connection did not come about: the server does not listen, does not speak
// TLS as wanted, turns everybody away, or no sentinel knows it.
type dialError struct{ error }

func (e *dialError) Error() string { return "connecting: " + e.error.Error() }

func (e *dialError) Unwrap() error { return e.error }

// markDialing makes the errors of connecting dialErrors.
type markDialing struct{}

func (markDialing) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := next(ctx, network, addr)
		if err != nil {
			return nil, &dialError{err}
		}
		return conn, nil
	}
}

// ProcessHook sees HELLO, with which a connection begins. A server that turns everybody away says
// why, and hangs up; the client takes any answer for that of a server without HELLO, and what it
// would find out by the next command is a broken connection only.
func (markDialing) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if err != nil && cmd.Name() == "hello" && (redis.HasErrorPrefix(err, "DENIED ") || redis.HasErrorPrefix(err, "max number of clients")) {
			// No answer of a server, in the client's eyes, which takes the outermost error off.
			return fmt.Errorf("hello: %w", &dialError{errors.New(err.Error())})
		}
		return err
	}
}

func (markDialing) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
