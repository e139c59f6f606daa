package e2e

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// failovers are the deployments in which a replica takes over when its master dies.
var failovers = []struct {
	name  string
	start func(t *testing.T) *failing
}{
	{"sentinel", func(t *testing.T) *failing {
		s := redistest.StartSentinel(t)
		return &failing{
			deployment: deployment{redis: bySentinel(s), servers: s.Servers},
			master:     s.Servers[0],
			replicas:   s.Servers[1:],
			has:        func(string) bool { return true },
			await:      s.AwaitFailover,
		}
	}},
	{"cluster", func(t *testing.T) *failing {
		c := redistest.StartCluster(t)
		master := c.MasterOf(t, "lock.deploy")
		return &failing{
			deployment: deployment{redis: "redis cluster " + strings.Join(c.Addrs, " "), servers: c.Servers},
			master:     master,
			replicas:   []*redistest.Server{c.Partner(master)},
			has:        func(key string) bool { return c.MasterOf(t, key) == master },
			await:      c.AwaitFailover,
		}
	}},
}

// failing is a deployment whose master dies.
type failing struct {
	deployment
	master   *redistest.Server // that has the lock deploy
	replicas []*redistest.Server
	has      func(key string) bool // the master has it
	await    func(t testing.TB, old *redistest.Server) (next *redistest.Server)
}

// The master dies while a lock is held and requests wait for it: what the replica knows goes on,
// in its order.
func TestFailoverKeepsLockAndLine(t *testing.T) {
	t.Parallel()
	for _, failover := range failovers {
		t.Run(failover.name, func(t *testing.T) {
			t.Parallel()
			f := failover.start(t)
			up := startUpstream(t, nil)
			one := startCaddy(t, f.global("wait 5m", "lease 1m"), "redis_lock deploy\n"+up.proxy())
			two := startCaddy(t, f.global("wait 5m", "lease 1m"), "redis_lock deploy\n"+up.proxy())
			first := up.occupy(t, one.url, "X-Id", "first")
			answers := lineUp(t, f.master, 6, two, one)
			f.master.Replicate(t, len(f.replicas))
			before := alive(t, f.master)
			if len(before) != 2 {
				t.Fatalf("%d Caddys in line, want 2", len(before))
			}
			f.master.Kill()
			next := f.await(t, f.master)
			await(t, "both Caddys to ask again", func() bool {
				after := alive(t, next)
				for process, until := range before {
					if after[process] <= until {
						return false
					}
				}
				return inLine(t, next, "deploy") == 6
			})
			if begun, ended, _ := up.count(); begun != 1 || ended != 0 {
				t.Errorf("%d began, %d ended; want the first one alone, still running", begun, ended)
			}
			up.letGo()
			wantStatus(t, <-first, 200)
			for _, a := range answers {
				wantStatus(t, <-a, 200)
			}
			if order := strings.Join(up.order(), " "); order != "first 0 1 2 3 4 5" {
				t.Errorf("served in the order %s", order)
			}
			noTrace(t, next)
		})
	}
}

// alive returns until when each Caddy in the line counts as alive.
func alive(t *testing.T, server *redistest.Server) map[string]string {
	t.Helper()
	return server.Client.HGetAll(t.Context(), "{lock.deploy}:alive").Val()
}

// The master dies with a lock that no replica has heard of: its request is cancelled soon after
// the replica has taken over, however long its lease.
func TestFailoverCancelsWhatItLost(t *testing.T) {
	t.Parallel()
	for _, failover := range failovers {
		t.Run(failover.name, func(t *testing.T) {
			t.Parallel()
			f := failover.start(t)
			up, other := startUpstream(t, nil), startUpstream(t, nil)
			c := startCaddy(t, f.global("lease 24h"), `handle /other {
				redis_lock deploy.other
				`+other.proxy()+`
			}
			redis_lock deploy
			`+up.proxy()+outcomePage)
			post(t, c.url+"/other", 200)
			for _, replica := range f.replicas {
				replica.Pause()
			}
			if err := f.master.Client.Do(t.Context(), "client", "kill", "type", "replica").Err(); err != nil {
				t.Fatal(err) // what is on its way already would arrive
			}
			first := up.occupy(t, c.url)
			f.master.Kill()
			for _, replica := range f.replicas {
				replica.Resume()
			}
			f.await(t, f.master)
			await(t, "the app to be cancelled", func() bool {
				do(t.Context(), newClient(t), http.MethodPost, c.url+"/other", "") // finds out about the outage, and its end
				_, _, cancelled := up.count()
				return cancelled == 1
			})
			a := <-first
			wantStatus(t, a, 503)
			if !strings.HasPrefix(a.body, "lost ") {
				t.Errorf("page %q, want outcome lost", a.body)
			}
			up.letGo()
			awaitServed(t, c)
		})
	}
}

// runs records which requests met another one of their name in the app.
type runs struct {
	mu      sync.Mutex
	running map[string][]*run
	met     []*run // that were still running when the next one began
}

type run struct{ cancelled atomic.Bool }

func (r *runs) ServeHTTP(_ http.ResponseWriter, request *http.Request) {
	name := request.Header.Get("X-Name")
	this := new(run)
	r.mu.Lock()
	r.met = append(r.met, r.running[name]...)
	r.running[name] = append(r.running[name], this)
	r.mu.Unlock()
	select {
	case <-time.After(20 * time.Millisecond):
	case <-request.Context().Done():
		this.cancelled.Store(true)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	rest := r.running[name][:0]
	for _, other := range r.running[name] {
		if other != this {
			rest = append(rest, other)
		}
	}
	r.running[name] = rest
}

// The master dies under load. Nothing overlaps but requests whose lock the replica had not heard
// of, and these are cancelled; and everything goes on without a restart.
func TestFailoverUnderLoad(t *testing.T) {
	t.Parallel()
	for _, failover := range failovers {
		t.Run(failover.name, func(t *testing.T) {
			t.Parallel()
			f := failover.start(t)
			app := &runs{running: make(map[string][]*run)}
			up := startUpstream(t, app.ServeHTTP)
			site := "redis_lock {header.X-Name}\n" + up.proxy()
			caddys := []*caddy{
				startCaddy(t, f.global("wait 1m"), site),
				startCaddy(t, f.global("wait 1m"), site),
			}
			var names []string
			for i := 0; len(names) < 4; i++ {
				if name := fmt.Sprint("name", i); f.has("lock." + name) {
					names = append(names, name)
				}
			}
			var over atomic.Bool
			var served, away atomic.Int64
			var last, gap atomic.Int64 // nanoseconds: when somebody was served, and the longest pause
			begin := time.Now()
			var clients sync.WaitGroup
			for i := range 16 {
				clients.Go(func() {
					client := newClient(t)
					for after := 0; after < 10; {
						a := do(t.Context(), client, http.MethodPost, caddys[i%2].url, "", "X-Name", names[i/2%4])
						switch {
						case a.err == nil && a.StatusCode == 200:
							served.Add(1)
							now := int64(time.Since(begin))
							if pause := now - last.Swap(now); pause > gap.Load() {
								gap.Store(pause)
							}
							if over.Load() {
								after++
							}
						case a.err == nil && a.StatusCode == 503:
							away.Add(1)
						default:
							t.Errorf("%+v", a)
							return
						}
					}
				})
			}
			await(t, "the load", func() bool { return served.Load() > 100 })
			f.master.Kill()
			f.await(t, f.master)
			over.Store(true)
			clients.Wait()
			for _, run := range app.met {
				if !run.cancelled.Load() {
					t.Error("a request overlapped that was not cancelled")
				}
			}
			t.Logf("%d served, %d answered with 503, %d cancelled, nobody was served for %v", served.Load(), away.Load(), len(app.met), time.Duration(gap.Load()))
			for _, server := range f.servers {
				if server != f.master {
					noKeys(t, server)
				}
			}
		})
	}
}

// One node of a quorum at a time is killed, hangs and is flushed, under load: nobody notices. Each
// is well again for two leases before the next one's turn.
func TestQuorumLosesNodes(t *testing.T) {
	t.Parallel()
	const lease = time.Second
	d := startQuorum(t)
	up := startUpstream(t, nil)
	site := "redis_lock {header.X-Name}\n" + up.proxy()
	caddys := []*caddy{
		startCaddy(t, d.global("wait 1m", "lease 1s"), site),
		startCaddy(t, d.global("wait 1m", "lease 1s"), site),
	}
	var over atomic.Bool
	var served atomic.Int64
	var clients sync.WaitGroup
	for i := range 8 {
		clients.Go(func() {
			client := newClient(t)
			for !over.Load() {
				if a := do(t.Context(), client, http.MethodPost, caddys[i%2].url, "", "X-Name", strconv.Itoa(i/2%2)); a.err != nil || a.StatusCode != 200 {
					t.Errorf("%+v", a)
					return
				}
				served.Add(1)
			}
		})
	}
	goesOn := func(while string) {
		before := served.Load()
		await(t, "requests to be served while a node "+while, func() bool { return t.Failed() || served.Load() > before+50 })
	}
	well := func(server *redistest.Server, since time.Time, pause time.Duration) {
		await(t, "a node to be well for long enough", func() bool { return server.Now(t).Sub(since) > pause })
	}
	const votes = lease + 2*time.Second // one that came up empty does not vote before
	goesOn("is well")
	d.servers[0].Kill()
	goesOn("is down")
	caddys[0].awaitLog(t, `"msg":"a server of the quorum is unavailable"`)
	d.servers[0].Restart(t)
	caddys[0].awaitLog(t, `"msg":"a server of the quorum is available again"`)
	well(d.servers[0], d.servers[0].Now(t), votes+2*lease)
	d.servers[1].Pause()
	goesOn("hangs")
	d.servers[1].Resume()
	well(d.servers[1], d.servers[1].Now(t), 2*lease)
	d.servers[2].Client.FlushAll(t.Context())
	goesOn("has been flushed")
	well(d.servers[2], d.servers[2].Now(t), votes+2*lease)
	goesOn("is well again")
	over.Store(true)
	clients.Wait()
	if most := up.overlap(); most != 1 {
		t.Errorf("%d of one name at the same time", most)
	}
	d.noKeys(t)
}
