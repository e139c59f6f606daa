package lock_test

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock/locktest"
)

var fencesAndLine = []locktest.Ability{locktest.Fences, locktest.Line}

// modes are the ways in which people run Redis. Each returns what opens Stores of one deployment.
var modes = []struct {
	name      string
	abilities []locktest.Ability
	start     func(t *testing.T) (open func() lock.Store)
}{
	{"memory", fencesAndLine, func(t *testing.T) func() lock.Store {
		store := lock.NewMemory()
		return func() lock.Store { return store }
	}},
	{"one server", fencesAndLine, func(t *testing.T) func() lock.Store {
		server := redistest.Start(t)
		return func() lock.Store { return openGetSet(t, server) }
	}},
	{"unix socket", fencesAndLine, func(t *testing.T) func() lock.Store {
		socket := filepath.Join(t.TempDir(), "redis.sock")
		redistest.Start(t, "--unixsocket", socket)
		return over(t, &redis.UniversalOptions{Addrs: []string{socket}})
	}},
	{"TLS and a user", fencesAndLine, func(t *testing.T) func() lock.Store {
		certs := redistest.NewCertificates(t)
		acl := filepath.Join(t.TempDir(), "users.acl")
		if err := os.WriteFile(acl, []byte("user default on nopass ~* &* +@all\nuser locker on >secret ~lock.* ~{lock.* &redis_lock:* +@all\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		server := redistest.StartTLS(t, certs, "--aclfile", acl)
		return over(t, &redis.UniversalOptions{
			Addrs: []string{server.Addr}, Username: "locker", Password: "secret", TLSConfig: clientTLS(t, certs),
		})
	}},
	{"sentinel", fencesAndLine, func(t *testing.T) func() lock.Store {
		sentinel := redistest.StartSentinelWith(t, redistest.Credentials{Password: "data"}, redistest.Credentials{Password: "guard"})
		return over(t, &redis.UniversalOptions{
			Addrs: sentinel.Addrs, MasterName: sentinel.Name, Password: "data", SentinelPassword: "guard",
		})
	}},
	{"cluster", fencesAndLine, func(t *testing.T) func() lock.Store {
		return overCluster(t, redistest.StartCluster(t))
	}},
}

func TestConformance(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			open := mode.start(t)
			locktest.TestStore(t, mode.abilities, func(*testing.T) func() lock.Store { return open })
		})
	}
}

// over returns what opens Stores over clients with these options.
func over(t *testing.T, options *redis.UniversalOptions) (open func() lock.Store) {
	return func() lock.Store {
		own := *options
		own.Addrs = slices.Clone(options.Addrs) // a cluster's client writes to it
		own.MaxRetries = -1
		own.DialerRetries = 1
		own.PipelinePoolSize = -1
		own.ContextTimeoutEnabled = true
		store := lock.NewGetSet(redis.NewUniversalClient(&own))
		t.Cleanup(func() { store.Close() })
		return store
	}
}

func overCluster(t *testing.T, cluster *redistest.Cluster) (open func() lock.Store) {
	return over(t, &redis.UniversalOptions{Addrs: cluster.Addrs[:2], IsClusterMode: true})
}

func clientTLS(t *testing.T, certs *redistest.Certificates) *tls.Config {
	t.Helper()
	ca, err := os.ReadFile(certs.CA)
	if err != nil {
		t.Fatal(err)
	}
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(ca)
	pair, err := tls.LoadX509KeyPair(certs.Client.Cert, certs.Client.Key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{RootCAs: trusted, Certificates: []tls.Certificate{pair}}
}
