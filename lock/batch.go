package lock

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A batcher sends script calls that come at the same time together: those that come while a
// pipeline is under way go with the next one.
type batcher struct {
	client redis.UniversalClient

	mu       sync.Mutex
	draining bool // a pipeline is under way
	waiting  []*scriptCall
	tasks    sync.WaitGroup
}

// A scriptCall is one EVALSHA and its answer, which is there when done is closed.
type scriptCall struct {
	script   *redis.Script
	keys     []string
	args     []any
	deadline time.Time
	done     chan struct{}
	raw      any
	err      error
}

// run returns what the script answers. It returns when ctx ends, too; sent is false if the
// call had not been sent by then, and never will be.
func (b *batcher) run(ctx context.Context, script *redis.Script, keys []string, args []any) (raw any, sent bool, err error) {
	call := &scriptCall{script: script, keys: keys, args: args, done: make(chan struct{})}
	if deadline, ok := ctx.Deadline(); ok {
		call.deadline = deadline
	} else {
		call.deadline = time.Now().Add(DefaultOpTimeout)
	}
	b.mu.Lock()
	b.waiting = append(b.waiting, call)
	if !b.draining {
		b.draining = true
		b.tasks.Go(b.drain)
	}
	b.mu.Unlock()

	select {
	case <-call.done:
		return call.raw, true, call.err
	case <-ctx.Done():
		return nil, !b.withdraw(call), ctx.Err()
	}
}

// withdraw is true if the call was still waiting.
func (b *batcher) withdraw(call *scriptCall) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.Index(b.waiting, call)
	if i < 0 {
		return false
	}
	b.waiting = slices.Delete(b.waiting, i, i+1)
	return true
}

// drain sends what is waiting until nothing is.
func (b *batcher) drain() {
	for {
		b.mu.Lock()
		calls := b.waiting
		b.waiting = nil
		b.draining = len(calls) > 0
		b.mu.Unlock()
		if len(calls) == 0 {
			return
		}
		b.send(calls)
	}
}

// send waits for the answers as long as the least patient caller does: the others may ask
// again, and must not be held up by one bad connection.
func (b *batcher) send(calls []*scriptCall) {
	deadline := slices.MinFunc(calls, func(a, b *scriptCall) int { return a.deadline.Compare(b.deadline) }).deadline
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	unknown := pipeline(ctx, b.client, calls, (*redis.Script).EvalSha)
	if len(unknown) > 0 { // a server that was restarted, or never heard of the script
		pipeline(ctx, b.client, unknown, (*redis.Script).Eval)
	}
	for _, call := range calls {
		close(call.done)
	}
}

// pipeline fills the answers in, and returns the calls whose script the server does not know.
func pipeline(ctx context.Context, client redis.UniversalClient, calls []*scriptCall,
	eval func(*redis.Script, context.Context, redis.Scripter, []string, ...any) *redis.Cmd,
) (unknown []*scriptCall) {
	pipe := client.Pipeline()
	answers := make([]*redis.Cmd, len(calls))
	for i, call := range calls {
		answers[i] = eval(call.script, ctx, pipe, call.keys, call.args...)
	}
	_, _ = pipe.Exec(ctx) // each answer has its own error
	for i, call := range calls {
		call.raw, call.err = answers[i].Result()
		if redis.HasErrorPrefix(call.err, "NOSCRIPT") {
			unknown = append(unknown, call)
		}
	}
	return unknown
}

// close waits until nothing is under way.
func (b *batcher) close() { b.tasks.Wait() }
