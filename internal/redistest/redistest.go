// Package redistest starts real redis-server processes for tests.
package redistest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
)

// A refused connection is nothing special here.
func init() { logging.Disable() }

// A Server is a redis-server process of one test, without persistence.
type Server struct {
	Addr   string        // host:port
	Client *redis.Client // the tests' own eyes and hands; never given to the code under test
	cmd    *exec.Cmd
	ended  chan struct{} // closed when the process has ended
	paused bool
	log    bytes.Buffer
	args   []string
}

// Start starts a server on a free port, with further arguments for its command line, and
// stops it when the test ends. Without redis-server in the PATH the test fails.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return StartAt(t, FreeAddr(t), args...)
}

// StartAt starts a server at an address of this machine.
func StartAt(t testing.TB, addr string, args ...string) *Server {
	t.Helper()
	return launch(t, &redis.Options{Addr: addr}, plain(addr, args)...)
}

// plain are the arguments of every server that keeps data, before its own: the last one counts.
func plain(addr string, args []string) []string {
	host, port, _ := strings.Cut(addr, ":")
	return slices.Concat([]string{"--port", port, "--bind", host, "--save", "", "--appendonly", "no", "--daemonize", "no"}, args)
}

// launch starts a process and waits until it answers to options.
func launch(t testing.TB, options *redis.Options, args ...string) *Server {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		t.Fatal("redis-server is not in the PATH: run the tests with `make test`, which installs it")
	}
	options.MaxRetries, options.DialerRetries, options.DisableIdentity = -1, 1, true
	s := &Server{Addr: options.Addr, Client: redis.NewClient(options), args: args}
	t.Cleanup(func() {
		s.Client.Close()
		s.Kill()
		if t.Failed() {
			t.Logf("log of the redis-server at %s:\n%s", s.Addr, &s.log)
		}
	})
	s.start(t)
	return s
}

// FreeAddr returns a loopback address with a port that nobody listens on, and that it has not
// returned before. It is below the range from which systems choose ports by themselves: such a
// one could be taken again, by a client's connection, before its server starts.
func FreeAddr(t testing.TB) string {
	t.Helper()
	for range 1000 {
		addr := fmt.Sprintf("127.0.0.1:%d", 10_000+rand.N(22_000))
		if _, taken := takenAddrs.LoadOrStore(addr, true); taken {
			continue
		}
		if ln, err := net.Listen("tcp", addr); err == nil {
			ln.Close()
			return addr
		}
	}
	t.Fatal("no free port")
	return ""
}

var takenAddrs sync.Map

func port(addr string) string {
	_, port, _ := strings.Cut(addr, ":")
	return port
}

func (s *Server) start(t testing.TB) {
	t.Helper()
	cmd := exec.Command("redis-server", s.args...)
	cmd.Dir = t.TempDir()
	cmd.Stdout = &s.log
	cmd.Stderr = &s.log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	s.cmd, s.ended = cmd, ended
	await(t, "redis-server at "+s.Addr+" to answer", func() bool {
		select {
		case <-ended:
			t.Fatalf("redis-server at %s ended", s.Addr) // why is in its log
		default:
		}
		return s.answers(t.Context())
	})
}

// await fails the test unless condition becomes true within a time that only a hung server
// takes.
func await(t testing.TB, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// answers is true also if all that the server says is that it wants a password.
func (s *Server) answers(ctx context.Context) bool {
	err := s.Client.Ping(ctx).Err()
	_, said := errors.AsType[redis.Error](err)
	return err == nil || said
}

// Pid is the process's id.
func (s *Server) Pid() int { return s.cmd.Process.Pid }

// Kill ends the server at once; everything in it is lost. Restart brings up an empty one.
func (s *Server) Kill() {
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
		<-s.ended
		s.cmd, s.paused = nil, false
	}
}

// Restart starts a killed server again, on the same address.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	s.start(t)
}

// Pause makes the server hang: it accepts connections (its kernel does) and answers nothing.
func (s *Server) Pause() {
	s.paused = true
	_ = s.cmd.Process.Signal(syscall.SIGSTOP)
}

// Resume ends Pause; the server goes on with whatever it was sent meanwhile.
func (s *Server) Resume() {
	s.paused = false
	_ = s.cmd.Process.Signal(syscall.SIGCONT)
}

// running is false for a server that the test has killed or paused.
func (s *Server) running() bool { return s.cmd != nil && !s.paused }

// info returns a field of a section of the server's INFO, empty if it has none.
func (s *Server) info(t testing.TB, section, field string) string {
	t.Helper()
	info, err := s.Client.Info(t.Context(), section).Result()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(info, "\n"+field+":")
	value, _, _ := strings.Cut(rest, "\r")
	return value
}

// Replicate waits until n replicas have all that the server has now.
func (s *Server) Replicate(t testing.TB, n int) {
	t.Helper()
	conn := s.Client.Conn()
	defer conn.Close()
	// WAIT waits for what was there at the end of its own connection's last command.
	result(t, conn.Ping(t.Context()))
	if have := result(t, conn.Wait(t.Context(), n, time.Minute)); int(have) < n {
		t.Fatalf("%d replicas have what the server at %s has, want %d", have, s.Addr, n)
	}
}

// RunID returns what tells this run of the server from others.
func (s *Server) RunID(t testing.TB) string {
	t.Helper()
	return s.info(t, "server", "run_id")
}

// AddUser has the server know a user, with the password "pass" and the given rights.
func (s *Server) AddUser(t testing.TB, name string, rights ...string) {
	t.Helper()
	command := []any{"acl", "setuser", name, "on", ">pass"}
	for _, right := range rights {
		command = append(command, right)
	}
	result(t, s.Client.Do(t.Context(), command...))
}

// Now returns the server's clock.
func (s *Server) Now(t testing.TB) time.Time {
	t.Helper()
	now, err := s.Client.Time(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	return now
}

// Reads returns how often the server read from a connection so far: a pipeline is one read.
func (s *Server) Reads(t testing.TB) int {
	t.Helper()
	reads, err := strconv.Atoi(s.info(t, "stats", "total_reads_processed"))
	if err != nil {
		t.Fatalf("stats: %v", err)
	}
	return reads
}

// Commands returns how often the server ran each command so far, those in scripts included.
// What a connection says at its beginning, and what this package asks, is left out.
func (s *Server) Commands(t testing.TB) map[string]int {
	t.Helper()
	info, err := s.Client.Info(t.Context(), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	commands := make(map[string]int)
	lines := bufio.NewScanner(strings.NewReader(info))
	for lines.Scan() {
		name, stats, found := strings.Cut(strings.TrimPrefix(lines.Text(), "cmdstat_"), ":calls=")
		if !found || name == "info" || name == "ping" || name == "hello" || name == "time" || strings.HasPrefix(name, "client") {
			continue
		}
		calls, _, _ := strings.Cut(stats, ",")
		if commands[name], err = strconv.Atoi(calls); err != nil {
			t.Fatalf("commandstats: %q: %v", lines.Text(), err)
		}
	}
	return commands
}

// result fails the test if a command failed.
func result[T any](t testing.TB, command interface{ Result() (T, error) }) T {
	t.Helper()
	value, err := command.Result()
	if err != nil {
		t.Fatalf("%v: %v", command, err)
	}
	return value
}
