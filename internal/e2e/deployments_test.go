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
}

var deployments = []struct {
	name  string
	start func(t *testing.T) *deployment
}{
	{"one server", func(t *testing.T) *deployment {
		server := redistest.Start(t)
		return &deployment{"redis " + server.Addr, []*redistest.Server{server}}
	}},
	{"unix socket", func(t *testing.T) *deployment {
		socket := filepath.Join(t.TempDir(), "redis.sock")
		server := redistest.Start(t, "--unixsocket", socket)
		return &deployment{"redis unix://" + socket, []*redistest.Server{server}}
	}},
	{"TLS", func(t *testing.T) *deployment {
		certs := redistest.NewCertificates(t)
		server := redistest.StartTLS(t, certs)
		return &deployment{fmt.Sprintf("redis %s {\ntls_trusted_ca_certs %s\ntls_client_auth %s %s\n}",
			server.Addr, certs.CA, certs.Client.Cert, certs.Client.Key), []*redistest.Server{server}}
	}},
	{"sentinel", func(t *testing.T) *deployment {
		sentinel := redistest.StartSentinel(t)
		return &deployment{bySentinel(sentinel), sentinel.Servers}
	}},
	{"cluster", func(t *testing.T) *deployment {
		cluster := redistest.StartCluster(t)
		return &deployment{"redis cluster " + strings.Join(cluster.Addrs[:2], " "), cluster.Servers}
	}},
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
	var ends []int64
	for _, server := range d.servers {
		if end, err := server.Client.Get(t.Context(), "lock."+name).Int64(); err == nil {
			ends = append(ends, end)
		}
	}
	if len(ends) == 0 {
		t.Fatal("no server has the lock")
	}
	slices.Sort(ends)
	return time.Unix(ends[len(ends)/2], 0)
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
