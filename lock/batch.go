package lock

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A batcher sends script calls: one that comes alone at once, those that come while others are
// under way together, as soon as an answer is there.
type batcher struct {
	client redis.UniversalClient

	mu      sync.Mutex
	flying  int // round trips under way
	waiting []*scriptCall
	tasks   sync.WaitGroup
}

// maxFlying is how many round trips are under way at a time. More of them make a call wait
// less for the network, and fewer make calls travel together more often, which saves the
// server, and this process, nearly all of their cost.
const maxFlying = 1

// A scriptCall is one EVALSHA, and its answer when done is closed.
type scriptCall struct {
	script *redis.Script
	keys   []string
	args   []any

	deadline time.Time
	done     chan struct{}
	raw      any
	err      error
}

// run returns what the script answers. It returns when ctx ends, too; sent is false if the
// call had not been sent by then, and never will be.
func (b *batcher) run(ctx context.Context, call *scriptCall) (raw any, sent bool, err error) {
	b.mu.Lock()
	if b.flying < maxFlying {
		b.flying++
		b.mu.Unlock()
		defer b.landed()
		raw, err := call.script.Run(ctx, b.client, call.keys, call.args...).Result()
		return raw, true, err
	}
	call.deadline = time.Now().Add(DefaultOpTimeout)
	if deadline, ok := ctx.Deadline(); ok {
		call.deadline = deadline
	}
	call.done = make(chan struct{})
	b.waiting = append(b.waiting, call)
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

// landed is called at the end of a round trip: the next one has everybody who waits.
func (b *batcher) landed() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) == 0 {
		b.flying--
		return
	}
	calls := b.waiting
	b.waiting = nil
	b.tasks.Go(func() {
		defer b.landed()
		b.send(calls)
	})
}

// send waits for the answers as long as the most patient caller does; the others leave by
// themselves.
func (b *batcher) send(calls []*scriptCall) {
	ctx, cancel := context.WithDeadline(context.Background(), slices.MaxFunc(calls, func(a, b *scriptCall) int {
		return a.deadline.Compare(b.deadline)
	}).deadline)
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
