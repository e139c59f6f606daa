// Package e2e tests the real Caddy binary with the module in it, over real HTTP, against real
// redis-servers.
package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

var caddyBinary string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "redis-lock-e2e")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		caddyBinary = filepath.Join(dir, "caddy")
		build := exec.Command("go", "build", "-race", "-o", caddyBinary, "../../cmd/caddy")
		if output, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "building caddy: %v\n%s", err, output)
			return 1
		}
		return m.Run()
	}())
}

// await fails the test unless condition becomes true within a time that only a hung program
// takes.
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

// A caddy is a process of the real binary.
type caddy struct {
	url   string // of the site that every configuration has
	addr  string
	admin string
	dir   string
	env   []string // beside the tests' own
	cmd   *exec.Cmd
	ended chan struct{} // closed when the process has ended
	log   syncBuffer
}

// config puts a site's directives, and global options before them, into a Caddyfile for c.
func (c *caddy) config(global, site string) string {
	return fmt.Sprintf("{\n\tadmin %s\n\tpersist_config off\n%s\n}\n\nhttp://%s {\n%s\n}\n", c.admin, global, c.addr, site)
}

// newCaddy chooses addresses. start runs it.
func newCaddy(t *testing.T) *caddy {
	t.Helper()
	addr := redistest.FreeAddr(t)
	return &caddy{url: "http://" + addr, addr: addr, admin: redistest.FreeAddr(t), dir: t.TempDir()}
}

func startCaddy(t *testing.T, global, site string) *caddy {
	t.Helper()
	c := newCaddy(t)
	c.start(t, c.config(global, site))
	return c
}

// start runs Caddy with a Caddyfile and waits until it serves.
func (c *caddy) start(t *testing.T, caddyfile string) {
	t.Helper()
	c.cmd = c.command("run", "--adapter", "caddyfile", "--config", c.write(t, caddyfile))
	c.cmd.Stdout = &c.log
	c.cmd.Stderr = &c.log
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.ended = make(chan struct{})
	go func() {
		defer close(c.ended)
		_ = c.cmd.Wait()
	}()
	t.Cleanup(func() {
		c.kill()
		if strings.Contains(c.log.String(), "DATA RACE") {
			t.Errorf("data race in caddy:\n%s", c.log.String())
		}
		if t.Failed() {
			t.Logf("caddy's log:\n%s", c.log.String())
		}
	})
	await(t, "caddy to serve", func() bool {
		select {
		case <-c.ended:
			t.Fatalf("caddy ended:\n%s", c.log.String())
		default:
		}
		conn, err := net.Dial("tcp", c.addr)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
}

func (c *caddy) write(t *testing.T, caddyfile string) string {
	t.Helper()
	path := filepath.Join(c.dir, "Caddyfile")
	if err := os.WriteFile(path, []byte(caddyfile), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// command is the binary with a home of its own.
func (c *caddy) command(args ...string) *exec.Cmd {
	cmd := exec.Command(caddyBinary, args...)
	cmd.Dir = c.dir
	cmd.Env = append(os.Environ(), "HOME="+c.dir, "XDG_DATA_HOME="+c.dir, "XDG_CONFIG_HOME="+c.dir)
	cmd.Env = append(cmd.Env, c.env...)
	return cmd
}

// reload gives a running Caddy another configuration.
func (c *caddy) reload(t *testing.T, caddyfile string) {
	t.Helper()
	if code, output := exitCode(t, c.command("reload", "--adapter", "caddyfile", "--config", c.write(t, caddyfile),
		"--address", c.admin)); code != 0 {
		t.Fatalf("caddy reload: %s", output)
	}
}

// terminate asks the process to end.
func (c *caddy) terminate() { _ = c.cmd.Process.Signal(syscall.SIGTERM) }

// stop freezes the process, cont lets it go on.
func (c *caddy) stop() { _ = c.cmd.Process.Signal(syscall.SIGSTOP) }
func (c *caddy) cont() { _ = c.cmd.Process.Signal(syscall.SIGCONT) }

// awaitLog waits until Caddy has logged something: its log arrives a little later than answers.
func (c *caddy) awaitLog(t *testing.T, text string) {
	t.Helper()
	await(t, text+" in the log", func() bool { return strings.Contains(c.log.String(), text) })
}

// awaitQuiet waits until nothing of ours is under way in the process.
func (c *caddy) awaitQuiet(t *testing.T) {
	t.Helper()
	await(t, "no goroutine of the module to be left", func() bool {
		return c.goroutines(t) == 0
	})
}

// goroutines returns how many of the process belong to the module, but for those that live as long
// as the connections: they listen to Redis, and look after the nodes of a quorum.
func (c *caddy) goroutines(t *testing.T) (n int) {
	t.Helper()
	response, err := http.Get("http://" + c.admin + "/debug/pprof/goroutine?debug=2")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	stacks, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	for stack := range strings.SplitSeq(string(stacks), "\n\n") {
		if strings.Contains(stack, "caddy-redis-lock/caddy-redis-lock") &&
			!strings.Contains(stack, "(*messages).listen") && !strings.Contains(stack, "(*quorum).keepMarked") {
			n++
		}
	}
	return n
}

// kill ends the process as a crash does.
func (c *caddy) kill() {
	_ = c.cmd.Process.Signal(syscall.SIGCONT)
	_ = c.cmd.Process.Kill()
	<-c.ended
}

// An upstream is the app behind Caddy. It counts how many requests with one X-Name run at the
// same time, and lets them run until they are let go.
type upstream struct {
	*httptest.Server
	mu        sync.Mutex
	running   map[string]int
	most      int      // that ever ran at the same time for one name
	served    []string // X-Id of requests, in the order in which they began
	fences    []string // their X-Fence
	ended     int      // how many have ended
	cancelled int      // how many of them were cancelled
	hold      chan struct{}
	handler   http.HandlerFunc
}

// startUpstream serves with handler, or with an empty 200 if nil.
func startUpstream(t *testing.T, handler http.HandlerFunc) *upstream {
	t.Helper()
	u := &upstream{running: make(map[string]int), handler: handler}
	u.Server = httptest.NewServer(u)
	t.Cleanup(func() {
		u.letGo()
		u.Close()
	})
	return u
}

func (u *upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name := r.Header.Get("X-Name")
	u.mu.Lock()
	u.running[name]++
	u.most = max(u.most, u.running[name])
	u.served = append(u.served, r.Header.Get("X-Id"))
	u.fences = append(u.fences, r.Header.Get("X-Fence"))
	hold := u.hold
	u.mu.Unlock()
	defer func() {
		u.mu.Lock()
		u.running[name]--
		u.ended++
		u.mu.Unlock()
	}()
	if u.handler == nil {
		_, _ = io.Copy(io.Discard, r.Body) // net/http notices a cancelled request only after that
	}
	if hold != nil {
		select {
		case <-hold:
		case <-r.Context().Done():
			u.mu.Lock()
			u.cancelled++
			u.mu.Unlock()
			return
		}
	}
	if u.handler != nil {
		u.handler(w, r)
	}
}

// holdAll keeps requests that begin from now on running until letGo.
func (u *upstream) holdAll() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.hold = make(chan struct{})
}

func (u *upstream) letGo() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.hold != nil {
		close(u.hold)
		u.hold = nil
	}
}

func (u *upstream) order() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return append([]string(nil), u.served...)
}

func (u *upstream) count() (begun, ended, cancelled int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.served), u.ended, u.cancelled
}

func (u *upstream) overlap() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.most
}

// runs is the number of requests in the upstream right now.
func (u *upstream) runs() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	n := 0
	for _, running := range u.running {
		n += running
	}
	return n
}

func (u *upstream) addr() string { return strings.TrimPrefix(u.URL, "http://") }

// proxy is the directive for it.
func (u *upstream) proxy() string { return "reverse_proxy " + u.addr() }

// A client has connections of its own.
func newClient(t *testing.T) *http.Client {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, MaxIdleConnsPerHost: 100}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: time.Minute}
}

type answer struct {
	*http.Response
	body string
	err  error
}

// do sends a request; header is a list of names and values.
func do(ctx context.Context, client *http.Client, method, url, body string, header ...string) answer {
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	response, err := client.Do(r)
	if err != nil {
		return answer{err: err}
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	return answer{response, string(content), err}
}

// post is a request that must be answered with status.
func post(t *testing.T, url string, status int, header ...string) answer {
	t.Helper()
	a := do(t.Context(), newClient(t), http.MethodPost, url, "", header...)
	wantStatus(t, a, status)
	return a
}

func wantStatus(t *testing.T, a answer, status int) {
	t.Helper()
	if a.err != nil {
		t.Fatalf("no answer: %v", a.err)
	}
	if a.StatusCode != status {
		t.Fatalf("status %d, want %d; body %q", a.StatusCode, status, a.body)
	}
}

// inFlight sends a request in the background. The channel gets its answer.
func inFlight(t *testing.T, url string, header ...string) <-chan answer {
	t.Helper()
	return inFlightBy(t, http.MethodPost, url, header...)
}

// inFlightBy is inFlight with any method.
func inFlightBy(t *testing.T, method, url string, header ...string) <-chan answer {
	t.Helper()
	answers := make(chan answer, 1)
	client := newClient(t)
	var done sync.WaitGroup
	done.Go(func() { answers <- do(context.WithoutCancel(t.Context()), client, method, url, "", header...) })
	t.Cleanup(done.Wait)
	return answers
}

// occupy sends a request and waits until it runs in the app, where it stays until letGo.
func (u *upstream) occupy(t *testing.T, url string, header ...string) <-chan answer {
	t.Helper()
	u.holdAll()
	first := inFlight(t, url, header...)
	await(t, "the request to run", func() bool { return u.runs() == 1 })
	return first
}

// hangUp sends a request, waits until it runs in the app, where it stays until letGo, and hangs
// up.
func (u *upstream) hangUp(t *testing.T, client *http.Client, url string) {
	t.Helper()
	u.holdAll()
	ctx, hangUp := context.WithCancel(t.Context())
	gone := make(chan answer)
	go func() { gone <- do(ctx, client, http.MethodPost, url, "{}") }()
	await(t, "the request to run", func() bool { return u.runs() == 1 })
	hangUp()
	<-gone
}

// startTLS runs Caddy with HTTPS, HTTP/2 and HTTP/3.
func startTLS(t *testing.T, global, site string) *caddy {
	t.Helper()
	c := newCaddy(t)
	c.url = "https://" + c.addr
	c.start(t, strings.Replace(c.config("local_certs\nskip_install_trust\n"+global, site), "http://"+c.addr, c.url, 1))
	return c
}

func onRedis(server *redistest.Server, options ...string) string {
	return "redis_lock {\nredis " + server.Addr + "\n" + strings.Join(options, "\n") + "\n}"
}

// syncBuffer is a bytes.Buffer that a process writes to while a test reads.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// exitCode runs a command to its end.
func exitCode(t *testing.T, cmd *exec.Cmd) (int, string) {
	t.Helper()
	output, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode(), string(output)
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0, string(output)
}
