package redislock

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// The name of a Redis leads to another server: the locks go there without a restart, and so do those
// who wait to be told of a hand-over.
func TestNameThatMovesIsFollowed(t *testing.T) {
	age := maxConnectionAge
	defer func() { maxConnectionAge = age }()
	for name, x := range map[string]struct {
		age  time.Duration
		then func(t *testing.T, old, next *redistest.Server) // what becomes of the old server
	}{
		"killed": {time.Hour, func(t *testing.T, old, next *redistest.Server) { old.Kill() }},
		"replica": {time.Hour, func(t *testing.T, old, next *redistest.Server) {
			host, port, _ := strings.Cut(next.Addr, ":")
			if err := old.Client.SlaveOf(t.Context(), host, port).Err(); err != nil {
				t.Fatal(err)
			}
		}},
		"goes on": {time.Second, func(*testing.T, *redistest.Server, *redistest.Server) {}},
	} {
		t.Run(name, func(t *testing.T) {
			maxConnectionAge = x.age
			old := redistest.Start(t)
			_, port, _ := strings.Cut(old.Addr, ":")
			next := redistest.StartAt(t, "127.0.0.2:"+port)
			name := strings.ReplaceAll(name, " ", "-") + ".test"
			nameServer.byName.Store(name+".", [4]byte{127, 0, 0, 1})

			shared, err := openRedis(&Redis{Address: []string{name + ":" + port}}, getsetProtocol)
			if err != nil {
				t.Fatal(err)
			}
			defer shared.close()
			l, done, err := shared.use()
			if err != nil {
				t.Fatal(err)
			}
			defer done()
			takes := func(server *redistest.Server, name string) bool {
				h, err := l.Acquire(t.Context(), name)
				if err != nil {
					return false
				}
				defer h.Release(context.Background())
				return server.Client.Exists(t.Context(), lock.Key(lock.DefaultPrefix, name)).Val() == 1
			}
			if !takes(old, "before") {
				t.Fatal("the name does not lead to the first server")
			}
			listens := func(server *redistest.Server) bool {
				return len(server.Client.PubSubChannels(t.Context(), "redis_lock:*").Val()) == 1
			}
			held, err := l.Acquire(t.Context(), "held")
			if err != nil {
				t.Fatal(err)
			}
			ctx, leave := context.WithCancel(t.Context())
			var waiting sync.WaitGroup
			waiting.Go(func() { _, _ = l.Acquire(ctx, "held", lock.Wait(time.Hour)) })
			await(t, "somebody to listen at the first server", func() bool { return listens(old) })
			leave()
			waiting.Wait()
			_ = held.Release(t.Context())

			nameServer.byName.Store(name+".", [4]byte{127, 0, 0, 2})
			x.then(t, old, next)
			await(t, "the locks to be at the second server", func() bool { return takes(next, "after") })
			if name != "replica.test" { // it passes on what its master says
				await(t, "somebody to listen at the second server", func() bool { return listens(next) })
			}
		})
	}
}

func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// nameServer is asked by this process, from its start on, for the names of hosts. Tests store their
// addresses in it.
var nameServer = startNameServer()

type dns struct{ byName sync.Map } // string, with a dot at its end -> [4]byte

func startNameServer() *dns {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	d := new(dns)
	go d.serve(conn)
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
	return d
}

func (d *dns) serve(conn net.PacketConn) {
	packet := make([]byte, 1500)
	for {
		n, from, err := conn.ReadFrom(packet)
		if err != nil {
			panic(err)
		}
		var message dnsmessage.Message
		if err := message.Unpack(packet[:n]); err != nil {
			panic(err)
		}
		message.Response, message.Authoritative, message.Additionals = true, true, nil
		question := message.Questions[0]
		if ip, known := d.byName.Load(question.Name.String()); known && question.Type == dnsmessage.TypeA {
			message.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: question.Name, Class: question.Class},
				Body:   &dnsmessage.AResource{A: ip.([4]byte)},
			}}
		}
		answer, err := message.Pack()
		if err != nil {
			panic(err)
		}
		_, _ = conn.WriteTo(answer, from)
	}
}
