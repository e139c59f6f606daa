package e2e

import (
	"context"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// What goes wrong around a lock, over every deployment. The tests of one share it, one after the
// other.
func TestFaults(t *testing.T) {
	for _, deployment := range deployments {
		t.Run(deployment.name, func(t *testing.T) {
			t.Parallel()
			d := deployment.start(t)
			t.Run("many at two Caddys", d.testTwoCaddys)
			t.Run("sender tries again", d.testRetries)
			t.Run("random aborts", d.testRandomAborts)
			t.Run("holder crashes", d.testCrashOfHolder)
			t.Run("holder is stopped", d.testStoppedHolder)
			t.Run("redis hangs", d.testHang)
			t.Run("redis is flushed", func(t *testing.T) { d.testLoss(t, d.flush) })
			t.Run("redis restarts empty", func(t *testing.T) { d.testLoss(t, d.restart) })
		})
	}
}

// Many clients at two Caddys: never two of one name in the upstream, and with enough patience
// nothing but 200.
func (d *deployment) testTwoCaddys(t *testing.T) {
	up := startUpstream(t, nil)
	site := "redis_lock {header.X-Name}\n" + up.proxy()
	caddys := []*caddy{
		startCaddy(t, d.global("wait 1m", "queue 100"), site),
		startCaddy(t, d.global("wait 1m", "queue 100"), site),
	}
	var clients sync.WaitGroup
	for i := range 32 {
		clients.Go(func() {
			client := newClient(t)
			for range 10 {
				a := do(t.Context(), client, http.MethodPost, caddys[i%2].url, "", "X-Name", "name"+strconv.Itoa(i/2%4))
				if a.err != nil || a.StatusCode != 200 {
					t.Errorf("%+v", a)
				}
			}
		})
	}
	clients.Wait()
	if most := up.overlap(); most != 1 {
		t.Errorf("%d requests of one name ran at the same time", most)
	}
	d.noKeys(t)
}

// The sender gives up and tries again, ten times, while the app works on the first: the app sees
// them one after the other.
func (d *deployment) testRetries(t *testing.T) {
	up := startUpstream(t, nil)
	c := startCaddy(t, d.global(), "redis_lock deploy\n"+up.proxy())
	up.holdAll()
	for try := range 10 {
		ctx, giveUp := context.WithCancel(t.Context())
		sent := make(chan answer)
		go func() { sent <- do(ctx, newClient(t), http.MethodPost, c.url, `{"try": true}`) }()
		if try == 0 {
			await(t, "the first to run", func() bool { return up.runs() == 1 })
			giveUp()
			<-sent
		} else {
			wantStatus(t, <-sent, 423)
			giveUp()
		}
	}
	if begun, ended, _ := up.count(); begun != 1 || ended != 0 {
		t.Errorf("%d began, %d ended; want the first one alone, still running", begun, ended)
	}
	up.letGo()
	d.noKeys(t)
	if _, _, cancelled := up.count(); cancelled != 0 {
		t.Error("the hang-up cancelled the app's work")
	}
	awaitServed(t, c) // nobody is there to hear of the release
}

// awaitServed waits until a request is served.
func awaitServed(t *testing.T, c *caddy) {
	t.Helper()
	await(t, "a request to be served", func() bool {
		a := do(t.Context(), newClient(t), http.MethodPost, c.url, "")
		return a.err == nil && a.StatusCode == 200
	})
}

// 500 requests over 200 names at two Caddys with different leases, with clients that leave at
// any moment: nothing overlaps, and nothing is left.
func (d *deployment) testRandomAborts(t *testing.T) {
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(rand.N(20 * time.Millisecond))
		_, _ = w.Write(make([]byte, rand.N(100_000)))
	})
	site := "redis_lock {header.X-Name}\n" + up.proxy()
	caddys := []*caddy{
		startCaddy(t, d.global("lease 1s", "wait 5s"), site),
		startCaddy(t, d.global("lease 3s", "wait 5s"), site),
	}
	requests := make(chan int)
	var clients sync.WaitGroup
	for range 25 {
		clients.Go(func() {
			client := newClient(t)
			for i := range requests {
				ctx, hangUp := context.WithTimeout(t.Context(), rand.N(60*time.Millisecond))
				do(ctx, client, http.MethodPost, caddys[i%2].url, strings.Repeat("x", rand.N(10_000)), "X-Name", strconv.Itoa(rand.N(200)))
				hangUp()
			}
		})
	}
	for i := range 500 {
		requests <- i
	}
	close(requests)
	clients.Wait()
	d.noKeys(t)
	for _, c := range caddys {
		c.awaitQuiet(t)
	}
	if most := up.overlap(); most != 1 {
		t.Errorf("%d of one name at the same time", most)
	}
}

// A Caddy dies with the lock: nobody starts before the lock's end, the next one soon after.
func (d *deployment) testCrashOfHolder(t *testing.T) {
	up := startUpstream(t, nil)
	site := "redis_lock deploy\n" + up.proxy()
	dying := startCaddy(t, d.global("lease 2s"), site)
	survivor := startCaddy(t, d.global("lease 2s", "wait 1m"), site)
	up.occupy(t, dying.url)
	dying.kill()
	await(t, "the app to notice", func() bool { return up.runs() == 0 })
	end := d.freeAt(t, "deploy")
	next := inFlight(t, survivor.url)
	await(t, "the next to run", func() bool { return up.runs() == 1 })
	now := d.servers[0].Now(t)
	if !now.After(end) {
		t.Errorf("the next one started at %v, before %v", now, end)
	}
	if late := now.Sub(end); late > 2500*time.Millisecond+5*time.Second { // noisy machines
		t.Errorf("the next one started %v after the lock had run out", late)
	}
	up.letGo()
	wantStatus(t, <-next, 200)
	d.noKeys(t)
}

// A Caddy is stopped past its lease and goes on: its request is over, and it does not touch the
// lock of the one that came after it.
func (d *deployment) testStoppedHolder(t *testing.T) {
	up, upNext := startUpstream(t, nil), startUpstream(t, nil)
	stopped := startCaddy(t, d.global("lease 1s"), "redis_lock deploy\n"+up.proxy())
	other := startCaddy(t, d.global("lease 10s", "wait 1m"), "redis_lock deploy\n"+upNext.proxy())
	up.holdAll()
	upNext.holdAll()
	first := inFlight(t, stopped.url)
	await(t, "the first to run", func() bool { return up.runs() == 1 })
	stopped.stop()
	second := inFlight(t, other.url)
	await(t, "the second to run", func() bool { return upNext.runs() == 1 })
	stopped.cont()
	wantStatus(t, <-first, 503)
	stopped.awaitQuiet(t)
	post(t, stopped.url, 423)
	if end := d.freeAt(t, "deploy"); !end.After(d.servers[0].Now(t)) {
		t.Error("the successor's lock is gone")
	}
	upNext.letGo()
	wantStatus(t, <-second, 200)
	d.noKeys(t)
}

// Redis hangs for longer than the lease: the app is cancelled before anybody else can have the
// lock, and nobody is stuck afterwards. The upstream is not taken out of rotation for it.
func (d *deployment) testHang(t *testing.T) {
	up := startUpstream(t, nil)
	c := startCaddy(t, d.global("lease 2s"), "redis_lock deploy\n"+
		"reverse_proxy "+up.addr()+" {\nfail_duration 1m\n}"+outcomePage)
	first := up.occupy(t, c.url)
	d.pause()
	await(t, "the app to be cancelled", func() bool { _, _, cancelled := up.count(); return cancelled == 1 })
	d.resume() // whoever asks now asks after that
	a := <-first
	wantStatus(t, a, 503)
	wantRetryAfter(t, a)
	if !strings.HasPrefix(a.body, "lost ") {
		t.Errorf("page %q, want outcome lost", a.body)
	}
	up.letGo()
	awaitServed(t, c)
	if most := up.overlap(); most != 1 {
		t.Errorf("%d at the same time", most)
	}
	d.noKeys(t)
	c.awaitQuiet(t)
}

// Redis comes back empty, or is flushed, while a request holds its lock: the request is cancelled
// with its next renewal, and the fences of those that come after are larger all the same.
func (d *deployment) testLoss(t *testing.T, lose func(*testing.T)) {
	up := startUpstream(t, nil)
	options := []string{"lease 3s"}
	if !d.quorum {
		options = append(options, "fence_header X-Fence")
	}
	c := startCaddy(t, d.global(options...), "redis_lock deploy\n"+up.proxy()+outcomePage)
	first := up.occupy(t, c.url)
	lose(t)
	a := <-first
	wantStatus(t, a, 503)
	if !strings.HasPrefix(a.body, "lost ") {
		t.Errorf("page %q, want outcome lost", a.body)
	}
	up.letGo()
	awaitServed(t, c)
	if before, after := up.fences[0], up.fences[1]; !d.quorum && (len(before) != len(after) || before >= after) {
		t.Errorf("fence %s, and %s afterwards", before, after)
	}
	d.noKeys(t)
	c.awaitQuiet(t)
}
