package main

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

// A fakeLocker hands out one lock in this process. The call with the number hangs waits until
// its context ends.
type fakeLocker struct {
	mu    sync.Mutex
	asked int
	hangs int
}

func (l *fakeLocker) with(ctx context.Context, _ string, work func()) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asked++; l.asked == l.hangs {
		l.mu.Unlock()
		defer l.mu.Lock()
		<-ctx.Done()
		return errors.New("some error of its own")
	}
	work()
	return nil
}

func (l *fakeLocker) close() error { return nil }

func TestContend(t *testing.T) {
	for _, hangs := range []int{0, 5} {
		from := monotonic()
		o := contendOrder{
			Callers: 4, Hold: time.Millisecond, Think: time.Millisecond,
			From: from, Until: from + 50*time.Millisecond, Drain: 50 * time.Millisecond,
		}
		result, err := o.run(t.Context(), &fakeLocker{hangs: hangs})
		if err != nil {
			t.Fatal(err)
		}
		if want := min(hangs, 1); result.Hung != want {
			t.Errorf("%d hung, want %d", result.Hung, want)
		}
		u := useOf(result.Held, window{o.From, o.Until})
		if u.overlaps != 0 || u.acquired < 4 || len(u.counts) != 4 {
			t.Errorf("%d overlaps, %d acquired by %v", u.overlaps, u.acquired, u.counts)
		}
	}
}

func TestPairs(t *testing.T) {
	result, err := pairsOrder{Callers: 3, Length: 20 * time.Millisecond}.run(t.Context(), new(fakeLocker))
	if err != nil {
		t.Fatal(err)
	}
	if result.Pairs < 3 || result.Elapsed < 20*time.Millisecond || result.P99 < result.P50 || result.CPU <= 0 {
		t.Errorf("%+v", result)
	}
}

func TestWorkerReportsErrors(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // so that the first call fails
	a := carryOut(ctx, &fakeLocker{hangs: 1}, order{Pairs: &pairsOrder{Callers: 1, Length: time.Second}})
	if a.Error == "" || a.Pairs != nil {
		t.Errorf("got %+v, want an error", a)
	}
}
