package lock

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A batcher sends script calls: those that come alone at once, and those that come while others
// are under way together, as soon as an answer is there.
type batcher struct {
	client redis.UniversalClient

	mu      sync.Mutex
	flying  int // round trips under way
	waiting []*scriptCall
	tasks   sync.WaitGroup
}

// maxFlying is how many round trips are under way at a time. With one, this process and the
// server would work in turns only; with more, fewer calls would travel together.
const maxFlying = 2

// run returns what the script answers. It returns at the deadline of ctx, and when ctx ends, too;
// sent is false if the call had not been sent by then, and never will be.
func (b *batcher) run(ctx context.Context, call *scriptCall) (raw any, sent bool, err error) {
	b.mu.Lock()
	free := b.flying < maxFlying
	if free {
		b.flying++
	}
	if free && ctx.Done() == nil { // its caller waits for the answer, as connections know deadlines only
		b.mu.Unlock()
		defer b.landed()
		raw, err := call.alone(ctx, b.client)
		return raw, true, err
	}
	call.done = make(chan struct{})
	call.deadline = time.Now().Add(DefaultOpTimeout)
	if deadline, ok := ctx.Deadline(); ok {
		call.deadline = deadline
	}
	b.waiting = append(b.waiting, call)
	if free {
		b.tasks.Go(b.fly)
	}
	b.mu.Unlock()

	patience := time.NewTimer(time.Until(call.deadline))
	defer patience.Stop()
	select {
	case <-call.done:
		return call.raw, true, call.err
	case <-patience.C:
		return nil, !b.withdraw(call), context.DeadlineExceeded
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
	b.tasks.Go(b.fly)
}

// fly is a round trip.
func (b *batcher) fly() {
	defer b.landed()
	runtime.Gosched() // those who have just got their answers may have another question
	b.mu.Lock()
	calls := b.waiting
	b.waiting = nil
	b.mu.Unlock()
	if len(calls) > 0 {
		b.send(calls)
	}
}

// send waits for the answers as long as the most patient caller does; the others leave by
// themselves.
func (b *batcher) send(calls []*scriptCall) {
	last := slices.MaxFunc(calls, func(a, b *scriptCall) int { return a.deadline.Compare(b.deadline) })
	together(until{context.Background(), last.deadline}, b.client, calls)
	for _, call := range calls {
		close(call.done)
	}
}

// together fills the answers in.
func together(ctx context.Context, client redis.UniversalClient, calls []*scriptCall) {
	unknown := pipeline(ctx, client, calls)
	if len(unknown) > 0 { // a server that was restarted, or never heard of the script
		pipeline(ctx, client, unknown)
	}
}

// pipeline fills the answers in, and returns the calls whose script the server does not know:
// sent again, they bring it along.
func pipeline(ctx context.Context, client redis.UniversalClient, calls []*scriptCall) (unknown []*scriptCall) {
	pipe := client.Pipeline()
	answers := make([]*redis.Cmd, len(calls))
	for i, call := range calls {
		if call.asking {
			pipe.Do(ctx, "asking")
		}
		answers[i] = call.command(ctx)
		_ = pipe.Process(ctx, answers[i])
	}
	_, _ = pipe.Exec(ctx) // each answer has its own error
	for i, call := range calls {
		call.raw, call.err = answers[i].Result()
		if call.isUnknown(call.err) {
			unknown = append(unknown, call)
		}
	}
	return unknown
}

// close waits until nothing is under way.
func (b *batcher) close() { b.tasks.Wait() }
