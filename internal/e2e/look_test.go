package e2e

import (
	"slices"
	"strings"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

const (
	starts = "locks live in redis"
	tells  = "redis answers"
	silent = "redis does not answer yet"
	evicts = "redis may evict locks when its memory is full: set its maxmemory-policy to noeviction, or give the locks a Redis of their own"
)

// awaitEntry waits for an entry of the log, and returns all that are like it.
func (c *caddy) awaitEntry(t *testing.T, msg, address string) (found []logged) {
	t.Helper()
	await(t, msg+" in the log", func() bool {
		found = logOf(c, msg, address)
		return len(found) > 0
	})
	return found
}

// The log says which Redis has the locks, and warns if that may evict them: once, whatever the number
// of directives and of reloads.
func TestLogSaysWhichRedis(t *testing.T) {
	t.Parallel()
	evicting := redistest.Start(t, "--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru")
	keeping := redistest.Start(t, "--maxmemory", "100mb", "--maxmemory-policy", "noeviction")
	unlimited := redistest.Start(t, "--maxmemory-policy", "allkeys-lru")
	master := redistest.Start(t)
	host, port, _ := strings.Cut(master.Addr, ":")
	replica := redistest.Start(t, "--replicaof", host, port)
	mute := redistest.Start(t, "--user", "default", "on", "nopass", "~*", "&*", "+@all", "-info")
	late := redistest.Start(t)
	late.Kill()
	version := version(t, keeping)
	all := []*redistest.Server{evicting, keeping, unlimited, replica, mute, late}

	var site strings.Builder
	for _, server := range all {
		site.WriteString(redisWith("/a", server.Addr, "") + redisWith("/b", server.Addr, ""))
	}
	up := startUpstream(t, nil)
	c := startCaddy(t, "debug", site.String()+up.proxy())
	for _, server := range all {
		if found := c.awaitEntry(t, starts, server.Addr); found[0].Mode != "one server" || found[0].Protocol != "getset" {
			t.Errorf("%+v", found)
		}
	}
	for _, server := range []*redistest.Server{evicting, keeping, unlimited, replica} {
		if found := c.awaitEntry(t, tells, server.Addr); found[0].Version != version || found[0].Role == "" {
			t.Errorf("%+v, want Redis %s", found, version)
		}
	}
	if found := c.awaitEntry(t, evicts, evicting.Addr); found[0].Level != "warn" {
		t.Errorf("%+v", found)
	}
	if found := c.awaitEntry(t, "redis is a replica, which cannot take locks: give the address of its master, or write redis sentinel", replica.Addr); found[0].Level != "error" {
		t.Errorf("%+v", found)
	}
	c.awaitEntry(t, "redis does not say which one it is", mute.Addr)
	if found := c.awaitEntry(t, silent, late.Addr); !strings.Contains(found[0].Error, "refused") || !strings.Contains(found[0].Remedy, "nothing listens there") {
		t.Errorf("%+v", found)
	}
	late.Restart(t)
	c.awaitEntry(t, tells, late.Addr)
	c.awaitQuiet(t)

	c.reload(t, c.config("debug", site.String()+"redis_lock {\nstatus 409\n}\n"+up.proxy()))
	c.awaitEntry(t, tells, evicting.Addr)
	c.awaitEntry(t, starts, "127.0.0.1:6379") // of the new directive: everything else is said by now
	for _, server := range all {
		want := map[string]int{starts: 1, tells: 1}
		switch server {
		case evicting:
			want[evicts] = 1
		case mute:
			want[tells] = 0
		case late:
			want[silent] = 1
		}
		for _, msg := range []string{starts, tells, silent, evicts} {
			if n := len(logOf(c, msg, server.Addr)); n != want[msg] {
				t.Errorf("%q is %d times in the log of the server %d, want %d", msg, n, slices.Index(all, server), want[msg])
			}
		}
	}
	c.reload(t, c.config("", "respond ok"))
	c.awaitQuiet(t) // also whoever looked for the Redis at 6379, if there is none
}

// Of a cluster, each master is looked at.
func TestLogSaysWhichCluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	addrs := strings.Join(cluster.Addrs[:2], " ")
	c := startCaddy(t, "redis_lock {\nredis cluster "+addrs+"\n}", "redis_lock\n")
	if found := c.awaitEntry(t, starts, addrs); found[0].Mode != "cluster" {
		t.Errorf("%+v", found)
	}
	var masters []string
	await(t, "three masters in the log", func() bool {
		masters = nil
		for _, entry := range logOf(c, tells, addrs) {
			masters = append(masters, entry.Server)
		}
		return len(masters) == 3
	})
	slices.Sort(masters)
	if want := slices.Sorted(slices.Values(cluster.Addrs[:3])); !slices.Equal(masters, want) {
		t.Errorf("masters %v, want %v", masters, want)
	}
}

// A configuration is checked, and replaced, without Redis.
func TestNobodyWaitsForALook(t *testing.T) {
	t.Parallel()
	hung := redistest.Start(t)
	hung.Pause()
	c := newCaddy(t)
	config := c.config("redis_lock {\nredis "+hung.Addr+" {\nop_timeout 10m\n}\n}", "redis_lock")
	if code, output := exitCode(t, c.command("validate", "--adapter", "caddyfile", "--config", c.write(t, config))); code != 0 {
		t.Fatalf("caddy validate:\n%s", output)
	}
	c.start(t, config)
	c.reload(t, c.config("", "respond ok"))
	c.awaitQuiet(t)
}

func version(t *testing.T, server *redistest.Server) string {
	t.Helper()
	info, err := server.Client.Info(t.Context(), "server").Result()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(info, "redis_version:")
	version, _, _ := strings.Cut(rest, "\r")
	return version
}
