package redistest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Credentials are what a server asks for: a password for everybody, or, with a user's name, an
// ACL in which there is only that user. The zero value is nothing.
type Credentials struct{ User, Password string }

// A Sentinel is a master with two replicas, and three sentinels that watch them.
type Sentinel struct {
	Name      string
	Addrs     []string      // of the sentinels
	Servers   []*Server     // that keep the data; the first begins as the master
	Sentinels []*Server     // in the order of Addrs
	Client    *redis.Client // of the master, whichever that is
}

// StartSentinel starts a deployment in which everybody knows everybody and the replicas are in
// sync. The arguments are for the servers that keep data.
func StartSentinel(t testing.TB, args ...string) *Sentinel {
	t.Helper()
	return StartSentinelWith(t, Credentials{}, Credentials{}, args...)
}

// StartSentinelWith has the servers that keep data, and the sentinels, ask for credentials.
func StartSentinelWith(t testing.TB, data, sentinels Credentials, args ...string) *Sentinel {
	t.Helper()
	s := &Sentinel{Name: "mymaster"}
	master := FreeAddr(t)
	for i := range 3 {
		addr, own := master, data.args()
		if i > 0 {
			addr = FreeAddr(t)
			own = append(own, "--replicaof", "127.0.0.1", port(master))
		}
		own = append(own, "--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
		s.Servers = append(s.Servers, launch(t, data.options(addr), plain(addr, append(own, args...))...))
	}
	await(t, "the replicas to be in sync", func() bool { return replicasInSync(t, s.Servers[0]) == 2 })
	for range 3 {
		s.Addrs = append(s.Addrs, FreeAddr(t))
	}
	for i, addr := range s.Addrs {
		s.Sentinels = append(s.Sentinels, launch(t, sentinels.options(addr), s.config(t, i, data, sentinels), "--sentinel"))
	}
	for _, sentinel := range s.Sentinels {
		// Sooner than once in a second or ten. Before Redis 7 these times are fixed. With a shorter
		// publish-period, they would take a promotion, which is noticed after a second, for an error.
		_ = sentinel.Client.Do(t.Context(), "sentinel", "debug", "ping-period", 200, "info-period", 200,
			"publish-period", 500, "ask-period", 200).Err()
	}
	s.Client = redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: s.Name, SentinelAddrs: s.Addrs,
		SentinelUsername: sentinels.User, SentinelPassword: sentinels.Password,
		Username: data.User, Password: data.Password,
	})
	t.Cleanup(func() { s.Client.Close() })
	await(t, "the sentinels to know each other and the replicas", func() bool { return s.settled(t) != nil })
	return s
}

// config writes a sentinel's file. It says what sentinels find out by themselves, too, which
// would take some seconds.
func (s *Sentinel) config(t testing.TB, self int, data, own Credentials) string {
	t.Helper()
	id := func(i int) string { return fmt.Sprintf("%040x", i+1) }
	lines := []string{
		"port " + port(s.Addrs[self]),
		"bind 127.0.0.1",
		"sentinel myid " + id(self),
		"sentinel monitor " + s.Name + " 127.0.0.1 " + port(s.Servers[0].Addr) + " 2",
		"sentinel down-after-milliseconds " + s.Name + " 1000",
		"sentinel failover-timeout " + s.Name + " 2000",
		"sentinel parallel-syncs " + s.Name + " 2",
	}
	if data.User != "" {
		lines = append(lines, "sentinel auth-user "+s.Name+" "+data.User)
	}
	if data.Password != "" {
		lines = append(lines, "sentinel auth-pass "+s.Name+" "+data.Password)
	}
	switch {
	case own.User != "":
		lines = append(lines, "user default off", "user "+own.User+" on >"+own.Password+" allkeys allchannels allcommands",
			"sentinel sentinel-user "+own.User, "sentinel sentinel-pass "+own.Password)
	case own.Password != "":
		lines = append(lines, "requirepass "+own.Password)
	}
	for i, addr := range s.Addrs {
		if i != self {
			lines = append(lines, "sentinel known-sentinel "+s.Name+" 127.0.0.1 "+port(addr)+" "+id(i))
		}
	}
	path := filepath.Join(t.TempDir(), "sentinel.conf")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// settled returns the master if it is one, all sentinels that run name it, and are in touch with
// each other and with the replicas that run, which follow it.
func (s *Sentinel) settled(t testing.TB) (master *Server) {
	t.Helper()
	for _, sentinel := range s.Sentinels {
		if !sentinel.running() {
			continue
		}
		named := s.named(t, sentinel)
		if master == nil {
			master = named
		}
		state := redis.NewMapStringStringCmd(t.Context(), "sentinel", "master", s.Name)
		replicas := redis.NewMapStringStringSliceCmd(t.Context(), "sentinel", "replicas", s.Name)
		others := redis.NewMapStringStringSliceCmd(t.Context(), "sentinel", "sentinels", s.Name)
		for _, ask := range []redis.Cmder{state, replicas, others} {
			_ = sentinel.Client.Process(t.Context(), ask) // no answer has nothing in it
		}
		if named != master || state.Val()["flags"] != "master" {
			return nil
		}
		for _, server := range s.Servers {
			r := find(replicas.Val(), server)
			if server != master && server.running() && (r["flags"] != "slave" ||
				r["master-link-status"] != "ok" || r["master-port"] != port(master.Addr)) {
				return nil
			}
		}
		for _, other := range s.Sentinels {
			if other != sentinel && other.running() && find(others.Val(), other)["flags"] != "sentinel" {
				return nil
			}
		}
	}
	if master == nil || !master.running() || master.info(t, "replication", "role") != "master" {
		return nil
	}
	return master
}

// find is the one among what a sentinel knows that is server.
func find(known []map[string]string, server *Server) map[string]string {
	for _, one := range known {
		if one["port"] == port(server.Addr) {
			return one
		}
	}
	return nil
}

// Master returns the server that the sentinels name now, which need not be true any more.
func (s *Sentinel) Master(t testing.TB) *Server {
	t.Helper()
	for _, sentinel := range s.Sentinels {
		if sentinel.running() {
			return s.named(t, sentinel)
		}
	}
	t.Fatal("no sentinel is running")
	return nil
}

// named is the master as one sentinel sees it.
func (s *Sentinel) named(t testing.TB, sentinel *Server) *Server {
	t.Helper()
	addr, err := sentinel.Client.Do(t.Context(), "sentinel", "get-master-addr-by-name", s.Name).StringSlice()
	if err != nil {
		t.Fatal(err)
	}
	return at(t, s.Servers, strings.Join(addr, ":"))
}

// Failover has the sentinels replace a living master, and returns the new one.
func (s *Sentinel) Failover(t testing.TB) *Server {
	t.Helper()
	return s.awaitFailover(t, s.Master(t), func() {
		// They refuse while one is under way, and give up one that takes too long.
		_ = s.Sentinels[0].Client.Do(t.Context(), "sentinel", "failover", s.Name).Err()
	})
}

// AwaitFailover waits until the sentinels have replaced old, which the test has killed or paused,
// and all who still run follow the new master. It returns that one. Until the failover has ended,
// sentinels may be slow to notice the next one.
func (s *Sentinel) AwaitFailover(t testing.TB, old *Server) *Server {
	t.Helper()
	return s.awaitFailover(t, old, func() {})
}

func (s *Sentinel) awaitFailover(t testing.TB, old *Server, still func()) (master *Server) {
	t.Helper()
	await(t, "a replica to be promoted", func() bool {
		master = s.settled(t)
		if master == old {
			still()
		}
		return master != nil && master != old
	})
	return master
}

func (c Credentials) options(addr string) *redis.Options {
	return &redis.Options{Addr: addr, Username: c.User, Password: c.Password}
}

// args has a server ask for the credentials, and give them to its master.
func (c Credentials) args() []string {
	switch {
	case c.User != "":
		return []string{
			"--user", "default", "off", "--masteruser", c.User, "--masterauth", c.Password,
			"--user", c.User, "on", ">" + c.Password, "allkeys", "allchannels", "allcommands",
		}
	case c.Password != "":
		return []string{"--requirepass", c.Password, "--masterauth", c.Password}
	}
	return nil
}

// replicasInSync counts those that a master has.
func replicasInSync(t testing.TB, master *Server) (n int) {
	t.Helper()
	for i := range 2 {
		if strings.Contains(master.info(t, "replication", fmt.Sprintf("slave%d", i)), "state=online") {
			n++
		}
	}
	return n
}

// at is the one of servers with an address.
func at(t testing.TB, servers []*Server, addr string) *Server {
	t.Helper()
	for _, server := range servers {
		if server.Addr == addr {
			return server
		}
	}
	t.Fatalf("%q is none of ours", addr)
	return nil
}
