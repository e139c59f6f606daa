package e2e

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

const secret = "geheim"

// Whatever keeps Redis from answering: the request gets a 503 that says nothing of it, and the log
// says once what it is, and what can be done about it.
func TestRemedies(t *testing.T) {
	t.Parallel()
	certs := redistest.NewCertificates(t)
	trusted := "tls_trusted_ca_certs " + certs.CA
	noClientAuth := []string{"--tls-auth-clients", "no"}
	start := func(args ...string) string { return redistest.Start(t, args...).Addr }
	startTLS := func(args ...string) string { return redistest.StartTLS(t, certs, args...).Addr }
	user := func(rights ...string) string {
		return start(append([]string{"--user", "locker", "on", ">" + secret, "~*", "&*"}, rights...)...)
	}
	const asUser = "username locker\npassword {env.SECRET}"
	full := redistest.Start(t)
	full.Client.ConfigSet(t.Context(), "maxclients", "1")
	sentinels, cluster := redistest.StartSentinel(t), redistest.StartCluster(t)
	other := cluster.Servers[0]
	if cluster.MasterOf(t, "lock.deploy") == other {
		other = cluster.Servers[1]
	}

	// address is what names it in the log.
	cases := map[string]struct{ address, options, err, remedy string }{
		"wrong password":     {start("--requirepass", "right"), "password {env.SECRET}", "WRONGPASS", "check username and password"},
		"user where is none": {start(), asUser, "WRONGPASS", "check username and password"},
		"no password":        {start("--requirepass", "right"), "", "NOAUTH", "set password"},

		"wrong CA":              {startTLS(noClientAuth...), "tls_trusted_ca_certs " + certs.OtherCA, "unknown authority", "tls_trusted_ca_certs"},
		"wrong host name":       {startTLS(append(noClientAuth, "--tls-cert-file", certs.OtherHost.Cert, "--tls-key-file", certs.OtherHost.Key)...), trusted, "cannot validate certificate for 127.0.0.1", "tls_server_name"},
		"no client certificate": {startTLS(), trusted, "", "tls_client_auth"}, // it says why, unless the connection breaks before that is read
		"TLS to a plain port":   {start(), trusted, "deadline exceeded", "redis:// for rediss://"},
		"TLS to an HTTP server": {httpServer(t), trusted, "TLS handshake", "does not speak TLS"},
		"plain to a TLS port":   {startTLS(noClientAuth...), "", "", "write tls"},

		"no right to EVAL":     {user("+@all", "-eval", "-evalsha"), asUser, "'evalsha'", "the user lacks a right"},
		"no right in a script": {user("+@all", "-pexpireat"), asUser, "script", "the user lacks a right"},

		"replica":         {sentinels.Servers[1].Addr, "", "READONLY", "give the address of its master"},
		"protected":       {protected(t), "", "DENIED", "requirepass"},
		"full of clients": {full.Addr, "", "max number of clients", "maxclients"},
		"full of data":    {start("--maxmemory", "1"), "", "OOM", "maxmemory"},
		"no replicas":     {start("--min-replicas-to-write", "1"), "", "NOREPLICAS", "min-replicas-to-write"},
		"no such db":      {start(), "db 99", "DB index is out of range", "check db"},

		"HTTP server":    {httpServer(t), "", "", "not the port of a Redis server"},
		"silent server":  {silentServer(t), "", "", "does not answer in time"},
		"closed port":    {redistest.FreeAddr(t), "", "connection refused", "nothing listens there"},
		"no such host":   {"no..such.host:6379", "", "no such host", "name of the host is unknown"}, // no DNS server need be asked
		"no such socket": {"unix://" + filepath.Join(t.TempDir(), "redis.sock"), "", "no such file", "no such socket"},

		"sentinel as server":  {sentinels.Addrs[0], "", "unknown command", "redis sentinel"},
		"server as sentinel":  {"sentinel " + start(), "master_name mymaster", "", "must be those of sentinels"},
		"no such master":      {"sentinel " + sentinels.Addrs[1], "master_name other", "", "check master_name"},
		"node as server":      {other.Addr, "", "MOVED", "redis cluster"},
		"server as cluster":   {"cluster " + start(), "", "cluster support disabled", "without cluster"},
		"sentinel as cluster": {"cluster " + sentinels.Addrs[2], "", "unknown command", "redis sentinel"},
	}
	var site strings.Builder
	for name, x := range cases {
		site.WriteString("redis_lock /" + strings.ReplaceAll(name, " ", "-") + " deploy {\nredis " + x.address + " {\n" + x.options + "\n}\n}\n")
	}
	up := startUpstream(t, nil)
	c := newCaddy(t)
	c.env = []string{"SECRET=" + secret}
	c.start(t, c.config("debug", site.String()+up.proxy()+outcomePage))

	var answers sync.Map
	var requests sync.WaitGroup
	for name := range cases {
		requests.Go(func() {
			for range 2 {
				answers.Store(name, do(t.Context(), newClient(t), http.MethodPost, c.url+"/"+strings.ReplaceAll(name, " ", "-"), ""))
			}
		})
	}
	requests.Wait()
	config := do(t.Context(), newClient(t), http.MethodGet, "http://"+c.admin+"/config/", "")
	wantStatus(t, config, 200)
	for name, x := range cases {
		t.Run(name, func(t *testing.T) {
			value, _ := answers.Load(name)
			a := value.(answer)
			wantStatus(t, a, 503)
			wantRetryAfter(t, a)
			if a.body != "error deploy 1 503 redis is unavailable, so the lock cannot be taken" {
				t.Errorf("page %q", a.body)
			}
			address := x.address[strings.LastIndexAny(x.address, " ")+1:]
			var outages []logged
			await(t, "the outage in the log", func() bool {
				outages = logOf(c, "redis is unavailable", strings.TrimPrefix(address, "unix://"))
				return len(outages) > 0
			})
			if len(outages) != 1 {
				t.Errorf("%d outages in the log", len(outages))
			}
			if o := outages[0]; !strings.Contains(o.Error, x.err) || !strings.Contains(o.Remedy, x.remedy) {
				t.Errorf("error %q, want %q;\nremedy %q, want %q", o.Error, x.err, o.Remedy, x.remedy)
			}
		})
	}
	for what, text := range map[string]string{"the log": c.log.String(), "the admin API": config.body} {
		if strings.Contains(text, secret) {
			t.Errorf("the password is in %s", what)
		}
	}
}

// logged is an entry of Caddy's log.
type logged struct {
	Level, Msg, Redis, Server, Error, Remedy, Version, Role, Mode, Protocol string
}

// logOf are the entries that say msg of the Redis at an address.
func logOf(c *caddy, msg, address string) (found []logged) {
	for line := range strings.Lines(c.log.String()) {
		var l logged
		if json.Unmarshal([]byte(line), &l) == nil && l.Msg == msg && l.Redis == address {
			found = append(found, l)
		}
	}
	return found
}

// protected is a server in protected mode, by an address that is not the loopback's.
func protected(t *testing.T) string {
	t.Helper()
	server := redistest.Start(t, "--bind", "0.0.0.0", "--protected-mode", "yes")
	_, port, _ := net.SplitHostPort(server.Addr)
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range addrs {
		if network, ok := addr.(*net.IPNet); ok && network.IP.To4() != nil && !network.IP.IsLoopback() {
			return net.JoinHostPort(network.IP.String(), port)
		}
	}
	t.Fatal("this machine has no address but loopback ones, from which protected mode keeps nobody out")
	return ""
}

func httpServer(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// silentServer takes connections, and says nothing.
func silentServer(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener.Addr().String()
}
