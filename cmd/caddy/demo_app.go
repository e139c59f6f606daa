package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	workTime = 600 * time.Millisecond
	idHeader = "X-Delivery" // tells the app which delivery a request is
)

// A slowApp is what Caddy protects: it knows of no lock, and witnesses what ran when.
type slowApp struct {
	address string // host:port
	server  http.Server
	served  chan error

	mu      sync.Mutex
	running map[string]int  // by path
	most    map[string]int  // by path: the highest value of running
	ran     map[string]span // by delivery
}

// A span is when a delivery ran; the zero span: it did not.
type span struct{ from, to time.Time }

// startApp starts an app on a free port, which drops its work when ctx ends.
func startApp(ctx context.Context) (*slowApp, error) {
	listener, err := net.Listen("tcp", anyPort)
	if err != nil {
		return nil, fmt.Errorf("the demo's app: %w", err)
	}
	a := &slowApp{
		address: listener.Addr().String(),
		served:  make(chan error, 1),
		running: make(map[string]int),
		most:    make(map[string]int),
		ran:     make(map[string]span),
	}
	a.server.Handler = http.HandlerFunc(a.serve)
	a.server.ReadHeaderTimeout = 5 * time.Second
	a.server.BaseContext = func(net.Listener) context.Context { return ctx }
	go func() { a.served <- a.server.Serve(listener) }()
	return a, nil
}

// stop waits for requests that are still under way.
func (a *slowApp) stop() error {
	shutdown := a.server.Shutdown(context.Background())
	if err := <-a.served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("the demo's app: %w", err)
	}
	return shutdown
}

// serve takes its time: as long as the query says, such as ?work=2.5s, or workTime.
func (a *slowApp) serve(w http.ResponseWriter, r *http.Request) {
	work := workTime
	if wanted := r.URL.Query().Get("work"); wanted != "" {
		var err error
		if work, err = time.ParseDuration(wanted); err != nil {
			http.Error(w, fmt.Sprintf("work: %q is not a duration such as 2.5s", wanted), http.StatusBadRequest)
			return
		}
	}
	begun := a.begin(r.URL.Path)
	sleep(r.Context(), work)
	ended := a.end(r.URL.Path, r.Header.Get(idHeader), begun)
	if r.Context().Err() != nil {
		http.Error(w, "the demo ended", http.StatusServiceUnavailable)
		return
	}
	const clock = "15:04:05.0"
	fmt.Fprintf(w, "ran from %s to %s\n", begun.Format(clock), ended.Format(clock))
}

func (a *slowApp) begin(path string) time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.running[path]++
	a.most[path] = max(a.most[path], a.running[path])
	return time.Now()
}

func (a *slowApp) end(path, id string, begun time.Time) time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.running[path]--
	a.ran[id] = span{begun, time.Now()}
	return a.ran[id].to
}

func (a *slowApp) runOf(id string) span {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ran[id]
}

// mostAtOnce returns how many requests ran at the same time, at most, for each path.
func (a *slowApp) mostAtOnce() map[string]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.most)
}

// sleep ends early when ctx does.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
