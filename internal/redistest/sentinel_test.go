package redistest

import (
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestStartSentinel(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name            string
		data, sentinels Credentials
	}{
		{"open to everybody", Credentials{}, Credentials{}},
		{"passwords", Credentials{Password: "data"}, Credentials{Password: "sentinel"}},
		{"users", Credentials{"d", "data"}, Credentials{"s", "sentinel"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := StartSentinelWith(t, c.data, c.sentinels)
			for _, server := range append(s.Servers, s.Sentinels...) {
				stranger := redis.NewClient(&redis.Options{Addr: server.Addr, MaxRetries: -1})
				defer stranger.Close()
				if open := stranger.Ping(t.Context()).Err() == nil; open != (c.data == Credentials{}) {
					t.Errorf("a stranger is let in at %s: %v", server.Addr, open)
				}
			}
			if master := s.Master(t); master != s.Servers[0] {
				t.Errorf("master at %s, want the first server", master.Addr)
			}
			if n := replicasInSync(t, s.Servers[0]); n != 2 {
				t.Errorf("%d replicas are in sync, want 2", n)
			}
			write(t, s, "before")

			second := s.Failover(t)
			if second == s.Servers[0] {
				t.Error("the failover changed nothing")
			}
			write(t, s, "between")

			second.Kill()
			third := s.AwaitFailover(t, second)
			if third == second || s.Master(t) != third {
				t.Errorf("master at %s after %s was killed", third.Addr, second.Addr)
			}
			write(t, s, "after")
			if err := third.Client.Get(t.Context(), "after").Err(); err != nil {
				t.Errorf("the deployment's client does not talk to the new master: %v", err)
			}
		})
	}
}

// write sets a key by the deployment's own client, which may hear of a failover a little late.
func write(t *testing.T, s *Sentinel, key string) {
	t.Helper()
	await(t, "the master to be written to", func() bool { return s.Client.Set(t.Context(), key, 1, 0).Err() == nil })
}
