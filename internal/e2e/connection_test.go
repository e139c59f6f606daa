package e2e

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// Every form of address, and every option that says where Redis is and who we are, reaches the Redis
// that it names, which answers nobody without it.
func TestConnections(t *testing.T) {
	t.Parallel()
	certs, public := redistest.NewCertificates(t), redistest.NewCertificates(t)
	socket := filepath.Join(t.TempDir(), "redis.sock")
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "secret")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return "{file." + path + "}"
	}
	withPassword, withUser := redistest.Start(t), redistest.Start(t, "--unixsocket", socket)
	withPassword.Client.ConfigSet(t.Context(), "requirepass", "p@ss") // the tests' own connections stay in
	withUser.Client.Do(t.Context(), "acl", "setuser", "locker", "on", ">p@ss", "allkeys", "allchannels", "allcommands")
	withUser.Client.Do(t.Context(), "acl", "setuser", "default", "off")
	noClientAuth := []string{"--tls-auth-clients", "no"}
	known, secure, mutual := redistest.StartTLS(t, public, noClientAuth...), redistest.StartTLS(t, certs, noClientAuth...), redistest.StartTLS(t, certs)
	otherHost := redistest.StartTLS(t, certs, append(noClientAuth, "--tls-cert-file", certs.OtherHost.Cert, "--tls-key-file", certs.OtherHost.Key)...)
	trusted := "tls_trusted_ca_certs " + certs.CA

	cases := map[string]struct {
		server           *redistest.Server
		address, options string
		db               int
	}{
		"password":    {withPassword, withPassword.Addr, "password p@ss", 0},
		"url":         {withPassword, "redis://:p%40ss@" + withPassword.Addr + "/3", "", 3},
		"url-user":    {withUser, "redis://locker:p%40ss@" + withUser.Addr, "db 4", 4},
		"unix":        {withUser, "unix://locker:p%40ss@" + socket + "?db=3", "", 3},
		"env-url":     {withUser, "{env.ADDRESS}", "", 3},
		"env-options": {withUser, withUser.Addr, "username {env.NAME}\npassword {env.PASSWORD}\ndb 5", 5},
		"file":        {withUser, "unix://" + socket, "username " + file("locker\n") + "\npassword " + file("p@ss\n"), 0},

		"tls":         {known, known.Addr, "tls", 0},
		"rediss":      {known, "rediss://" + known.Addr + "/3", "", 3},
		"ca":          {secure, "rediss://" + secure.Addr, trusted, 0},
		"ca-implies":  {secure, secure.Addr, "tls_trusted_ca_certs " + certs.OtherCA + " {env.CA}", 0},
		"server-name": {otherHost, otherHost.Addr, "tls_server_name redis.example\n" + trusted, 0},
		"client-auth": {mutual, mutual.Addr, "tls_client_auth {env.CERT} " + certs.Client.Key + "\n" + trusted, 0},
		"insecure":    {otherHost, otherHost.Addr, "tls_insecure_skip_verify", 0},
	}
	var site strings.Builder
	for name, x := range cases {
		fmt.Fprintf(&site, "redis_lock /%s %s {\nredis %s {\n%s\n}\n}\n", name, name, x.address, x.options)
	}
	up := startUpstream(t, nil)
	c := newCaddy(t)
	c.env = []string{
		"ADDRESS=redis://locker:p%40ss@" + withUser.Addr + "/3", "NAME=locker", "PASSWORD=p@ss",
		"CA=" + certs.CA, "CERT=" + certs.Client.Cert,
		"SSL_CERT_FILE=" + public.CA, // the system's
	}
	c.start(t, c.config("", site.String()+up.proxy()))
	for name, x := range cases {
		if a := do(t.Context(), newClient(t), http.MethodPost, c.url+"/"+name, ""); a.err != nil || a.StatusCode != 200 {
			t.Errorf("%s: %+v", name, a)
			continue
		}
		conn := x.server.Client.Conn()
		conn.Select(t.Context(), x.db)
		if conn.Exists(t.Context(), "{lock."+name+"}:holder").Val() != 1 {
			t.Errorf("%s: the lock was not in this database", name)
		}
		conn.Select(t.Context(), 0)
		conn.Close()
	}
	if log := c.log.String(); strings.Contains(log, "p@ss") || strings.Contains(log, "p%40ss") {
		t.Error("the password is in the log")
	}
}

// How long a Redis that hangs is waited for is for op_timeout to say, be it short or long.
func TestOpTimeout(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, "", redisWith("/minute", server.Addr, "op_timeout 1m")+redisWith("/long", server.Addr, "op_timeout 7s")+
		redisWith("/short", server.Addr, "op_timeout 50ms")+up.proxy())
	server.Pause()
	minute, long := inFlight(t, c.url+"/minute"), inFlight(t, c.url+"/long")
	post(t, c.url+"/short", 503)
	if len(long) != 0 {
		t.Error("50ms were longer than 7s")
	}
	wantStatus(t, <-long, 503)
	if len(minute) != 0 {
		t.Error("7s were longer than a minute")
	}
	server.Resume()
	wantStatus(t, <-minute, 200)
}

// Connecting has a time of its own, within that of the operation.
func TestDialTimeout(t *testing.T) {
	t.Parallel()
	addr := deafServer(t)
	c := startCaddy(t, "", redisWith("/default", addr, "op_timeout 10s")+redisWith("/short", addr, "op_timeout 10s\ndial_timeout 50ms"))
	byDefault := inFlight(t, c.url+"/default")
	post(t, c.url+"/short", 503)
	if len(byDefault) != 0 {
		t.Error("50ms were longer than three quarters of 10s")
	}
	wantStatus(t, <-byDefault, 503)
	for _, entry := range logOf(c, "redis is unavailable", addr) {
		if !strings.Contains(entry.Error, "dial tcp "+addr+": i/o timeout") {
			t.Errorf("error %q", entry.Error)
		}
	}
}

// deafServer is an address that never completes a connection: a listener whose backlog is full.
func deafServer(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	for {
		conn, err := net.DialTimeout("tcp", addr, 100*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { conn.Close() })
	}
}

// A server has no more connections than pool_size, however many requests come at once.
func TestPoolSize(t *testing.T) {
	t.Parallel()
	narrow, wide := redistest.Start(t), redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, "", redisWith("/narrow", narrow.Addr, "pool_size 1")+redisWith("/wide", wide.Addr, "pool_size 5")+up.proxy())
	await(t, "several connections where they are allowed", func() bool {
		for _, server := range []*redistest.Server{narrow, wide} {
			server.Client.Do(t.Context(), "client", "pause", 50, "all") // so that they are needed
		}
		var clients sync.WaitGroup
		for i := range 10 {
			for _, path := range []string{"/narrow", "/wide"} {
				clients.Go(func() { post(t, c.url+path+fmt.Sprint(i), 200) })
			}
		}
		clients.Wait()
		return connections(t, wide) > 1
	})
	if n := connections(t, narrow); n != 1 {
		t.Errorf("%d connections, want one", n)
	}
}

// redisWith is a directive for paths that begin with path, on the Redis at an address.
func redisWith(path, address, options string) string {
	return fmt.Sprintf("redis_lock %s* {path} {\nredis %s {\n%s\n}\n}\n", path, address, options)
}
