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
	log    bytes.Buffer
	args   []string
}

// Start starts a server on a free port, with further arguments for its command line, and
// stops it when the test ends. Without redis-server in the PATH the test fails.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		t.Fatal("redis-server is not in the PATH: run the tests with `make test`, which installs it")
	}
	s := &Server{Addr: FreeAddr(t), args: args}
	s.Client = redis.NewClient(&redis.Options{Addr: s.Addr, MaxRetries: -1, DialerRetries: 1, DisableIdentity: true})
	s.start(t)
	t.Cleanup(func() {
		s.Client.Close()
		s.Kill()
	})
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

func (s *Server) start(t testing.TB) {
	t.Helper()
	_, port, _ := strings.Cut(s.Addr, ":")
	s.log.Reset()
	s.cmd = exec.Command("redis-server", append([]string{
		"--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--daemonize", "no",
	}, s.args...)...)
	s.cmd.Dir = t.TempDir()
	s.cmd.Stdout = &s.log
	s.cmd.Stderr = &s.log
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(20 * time.Second)
	for !s.answers(t.Context()) {
		if time.Now().After(deadline) {
			s.Kill() // so that the log is complete
			t.Fatalf("redis-server at %s does not answer:\n%s", s.Addr, &s.log)
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

// Kill ends the server at once; everything in it is lost. Restart brings up an empty one.
func (s *Server) Kill() {
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

// Restart starts a killed server again, on the same address.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	s.start(t)
}

// Pause makes the server hang: it accepts connections (its kernel does) and answers nothing.
func (s *Server) Pause() { _ = s.cmd.Process.Signal(syscall.SIGSTOP) }

// Resume ends Pause; the server goes on with whatever it was sent meanwhile.
func (s *Server) Resume() { _ = s.cmd.Process.Signal(syscall.SIGCONT) }

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
	info, err := s.Client.Info(t.Context(), "stats").Result()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(info, "total_reads_processed:")
	count, _, _ := strings.Cut(rest, "\r")
	reads, err := strconv.Atoi(count)
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
