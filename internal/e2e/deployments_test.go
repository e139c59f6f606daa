package e2e

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// A deployment is one of the ways in which people run Redis.
type deployment struct {
	redis   string              // the option that leads to it
	servers []*redistest.Server // those that keep keys
	quorum  bool
	token   bool // of the protocol
}

var deployments = []struct {
	name  string
	start func(t *testing.T) *deployment
}{
	{"one server", func(t *testing.T) *deployment {
		server := redistest.Start(t)
		return &deployment{redis: "redis " + server.Addr, servers: []*redistest.Server{server}}
	}},
	{"protocol token", func(t *testing.T) *deployment {
		server := redistest.Start(t)
		return &deployment{redis: "protocol token\nredis " + server.Addr, servers: []*redistest.Server{server}, token: true}
	}},
	{"unix socket", func(t *testing.T) *deployment {
		socket := filepath.Join(t.TempDir(), "redis.sock")
		server := redistest.Start(t, "--unixsocket", socket)
		return &deployment{redis: "redis unix://" + socket, servers: []*redistest.Server{server}}
	}},
	{"TLS", func(t *testing.T) *deployment {
		certs := redistest.NewCertificates(t)
		server := redistest.StartTLS(t, certs)
		return &deployment{redis: fmt.Sprintf("redis %s {\ntls_trusted_ca_certs %s\ntls_client_auth %s %s\n}",
			server.Addr, certs.CA, certs.Client.Cert, certs.Client.Key), servers: []*redistest.Server{server}}
	}},
	{"sentinel", func(t *testing.T) *deployment {
		sentinel := redistest.StartSentinel(t)
		return &deployment{redis: bySentinel(sentinel), servers: sentinel.Servers}
	}},
	{"cluster", func(t *testing.T) *deployment {
		cluster := redistest.StartCluster(t)
		return &deployment{redis: "redis cluster " + strings.Join(cluster.Addrs[:2], " "), servers: cluster.Servers}
	}},
	{"quorum", startQuorum},
}

// startQuorum starts three servers that may vote at once, as if they had been up for long.
func startQuorum(t *testing.T) *deployment {
	d := &deployment{redis: "redis quorum", quorum: true}
	for range 3 {
		server := redistest.Start(t)
		if err := server.Client.Set(t.Context(), "{redis_lock}:since", server.RunID(t)+" 1", 0).Err(); err != nil {
			t.Fatal(err)
		}
		d.redis += " " + server.Addr
		d.servers = append(d.servers, server)
	}
	return d
}

func bySentinel(s *redistest.Sentinel) string {
	return fmt.Sprintf("redis sentinel %s {\nmaster_name %s\n}", strings.Join(s.Addrs, " "), s.Name)
}

// global is the global option for it.
func (d *deployment) global(options ...string) string {
	return "redis_lock {\n" + d.redis + "\n" + strings.Join(options, "\n") + "\n}"
}

func (d *deployment) pause() {
	for _, server := range d.servers {
		server.Pause()
	}
}

func (d *deployment) resume() {
	for _, server := range d.servers {
		server.Resume()
	}
}

// flush deletes everything. Replicas refuse, and follow.
func (d *deployment) flush(t *testing.T) {
	for _, server := range d.servers {
		_ = server.Client.FlushAll(t.Context()).Err()
	}
}

// noKeys waits until no lock is left.
func (d *deployment) noKeys(t *testing.T) {
	t.Helper()
	for _, server := range d.servers {
		noKeys(t, server)
	}
}

// freeAt returns until when a lock lasts, as the servers say: where several have it, until when
// most of them do.
func (d *deployment) freeAt(t *testing.T, name string) time.Time {
	t.Helper()
	var ends []time.Time
	for _, server := range d.servers {
		if d.token {
			now := server.Now(t)
			if left := server.Client.PTTL(t.Context(), "lock."+name).Val(); left > 0 {
				ends = append(ends, now.Add(left))
			}
		} else if end, err := server.Client.Get(t.Context(), "lock."+name).Int64(); err == nil {
			ends = append(ends, time.Unix(end, 0))
		}
	}
	if len(ends) == 0 {
		t.Fatal("no server has the lock")
	}
	slices.SortFunc(ends, time.Time.Compare)
	return ends[len(ends)/2]
}

// restart has all servers begin anew, empty.
func (d *deployment) restart(t *testing.T) {
	for _, server := range d.servers {
		server.Kill()
	}
	for _, server := range d.servers {
		server.Restart(t)
	}
}
