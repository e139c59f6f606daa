package lock_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock/locktest"
)

// What each kind of Store is able to do. The README's table says the same.
var (
	getsetAbilities = []locktest.Ability{locktest.Fences, locktest.Line, locktest.Deliveries, locktest.Newest, locktest.OutlivesKey}
	tokenAbilities  = []locktest.Ability{locktest.Fences, locktest.Line, locktest.Deliveries, locktest.Newest, locktest.EndsWithKey}
	quorumAbilities = []locktest.Ability{locktest.OutlivesServer, locktest.OutlivesKey}
	memoryAbilities = []locktest.Ability{locktest.Fences, locktest.Line, locktest.Deliveries, locktest.Newest}
)

// modes are the ways in which people run Redis: each starts a deployment, and returns how to
// reach it and what deletes a key.
var modes = []struct {
	name  string
	start func(t *testing.T) (reach *redis.UniversalOptions, del func(key string))
}{
	{"one server", func(t *testing.T) (*redis.UniversalOptions, func(string)) {
		server := redistest.Start(t)
		return clientOptions(server.Addr), deleteIn(server.Client)
	}},
	{"unix socket", func(t *testing.T) (*redis.UniversalOptions, func(string)) {
		socket := filepath.Join(t.TempDir(), "redis.sock")
		server := redistest.Start(t, "--unixsocket", socket)
		return clientOptions(socket), deleteIn(server.Client)
	}},
	{"TLS and a user", func(t *testing.T) (*redis.UniversalOptions, func(string)) {
		certs := redistest.NewCertificates(t)
		acl := filepath.Join(t.TempDir(), "users.acl")
		if err := os.WriteFile(acl, []byte("user default on nopass ~* &* +@all\nuser locker on >secret ~lock.* ~{lock.* &redis_lock:* +@all\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		server := redistest.StartTLS(t, certs, "--aclfile", acl)
		reach := clientOptions(server.Addr)
		reach.Username, reach.Password, reach.TLSConfig = "locker", "secret", clientTLS(t, certs)
		return reach, deleteIn(server.Client)
	}},
	{"sentinel", func(t *testing.T) (*redis.UniversalOptions, func(string)) {
		sentinel := redistest.StartSentinelWith(t, redistest.Credentials{Password: "data"}, redistest.Credentials{Password: "guard"})
		reach := clientOptions(sentinel.Addrs...)
		reach.MasterName, reach.Password, reach.SentinelPassword = sentinel.Name, "data", "guard"
		return reach, deleteIn(sentinel.Client)
	}},
	{"cluster", func(t *testing.T) (*redis.UniversalOptions, func(string)) {
		cluster := redistest.StartCluster(t)
		return toCluster(cluster), func(key string) { deleteIn(cluster.MasterOf(t, key).Client)(key) }
	}},
}

func deleteIn(client *redis.Client) func(key string) {
	return func(key string) { client.Del(context.Background(), key) }
}

// clientOptions are as NewGetSet wants them.
func clientOptions(addrs ...string) *redis.UniversalOptions {
	return &redis.UniversalOptions{Addrs: addrs, MaxRetries: -1, DialerRetries: 1, PipelinePoolSize: -1, ContextTimeoutEnabled: true}
}

func toCluster(cluster *redistest.Cluster) *redis.UniversalOptions {
	reach := clientOptions(cluster.Addrs[:2]...)
	reach.IsClusterMode = true
	return reach
}

func TestConformance(t *testing.T) {
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		store := lock.NewMemory()
		locktest.TestStore(t, memoryAbilities, locktest.World{Open: func() lock.Store { return store }})
	})
	t.Run("quorum", func(t *testing.T) {
		t.Parallel()
		servers := startNodes(t, 3)
		locktest.TestStore(t, quorumAbilities, locktest.World{
			Open: func() lock.Store { return openQuorum(t, servers) },
			LoseKey: func(key string) {
				for _, server := range servers {
					deleteIn(server.Client)(key)
				}
			},
			LoseServer: servers[2].Kill,
		})
	})
	for _, mode := range modes {
		t.Run(mode.name, func(t *testing.T) {
			t.Parallel()
			reach, del := mode.start(t)
			t.Run("getset", func(t *testing.T) {
				locktest.TestStore(t, getsetAbilities, locktest.World{Open: over(t, lock.NewGetSet, reach), LoseKey: del})
			})
			t.Run("token", func(t *testing.T) {
				locktest.TestStore(t, tokenAbilities, locktest.World{Open: over(t, lock.NewToken, reach), LoseKey: del})
			})
		})
	}
}

// The README's table says what each kind of Store is able to do.
func TestReadmeAbilities(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, ability := range locktest.Abilities {
		row := "| " + string(ability) + " |"
		for _, abilities := range [][]locktest.Ability{getsetAbilities, tokenAbilities, quorumAbilities, memoryAbilities} {
			if slices.Contains(abilities, ability) {
				row += " yes |"
			} else {
				row += " - |"
			}
		}
		if !strings.Contains(string(readme), row+"\n") {
			t.Errorf("README.md does not say: %s", row)
		}
	}
}

// over returns what opens Stores over clients with these options.
func over(t *testing.T, newStore func(redis.UniversalClient) lock.Store, options *redis.UniversalOptions) (open func() lock.Store) {
	return func() lock.Store {
		own := *options
		own.Addrs = slices.Clone(options.Addrs) // a cluster's client writes to it
		store := newStore(redis.NewUniversalClient(&own))
		t.Cleanup(func() { store.Close() })
		return store
	}
}

func overCluster(t *testing.T, cluster *redistest.Cluster) (open func() lock.Store) {
	return over(t, lock.NewGetSet, toCluster(cluster))
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
