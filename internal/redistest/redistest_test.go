package redistest

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestServer(t *testing.T) {
	t.Parallel()
	s := Start(t)
	result(t, s.Client.Set(t.Context(), "a", 1, 0))
	process, err := os.FindProcess(s.Pid())
	if err != nil {
		t.Fatal(err)
	}
	s.Kill()
	if err := process.Signal(syscall.Signal(0)); err == nil {
		t.Error("the killed process still runs")
	}
	if err := s.Client.Ping(t.Context()).Err(); err == nil || s.running() {
		t.Error("a killed server answers, or counts as running")
	}
	s.Restart(t)
	if n := result(t, s.Client.Exists(t.Context(), "a")); n != 0 {
		t.Error("the restarted server is not empty")
	}
	s.Pause()
	other := redis.NewClient(&redis.Options{Addr: s.Addr, MaxRetries: -1, ReadTimeout: 50 * time.Millisecond})
	defer other.Close()
	if err := other.Ping(t.Context()).Err(); err == nil || s.running() {
		t.Error("a paused server answers, or counts as running")
	}
	s.Resume()
	if err := s.Client.Ping(t.Context()).Err(); err != nil || !s.running() {
		t.Errorf("a resumed server: %v", err)
	}
}

// Whatever redis-server understands can be asked for.
func TestStartWithArguments(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	s := Start(t, "--unixsocket", socket, "--requirepass", "secret")
	if err := s.Client.Ping(t.Context()).Err(); !redis.HasErrorPrefix(err, "NOAUTH") {
		t.Errorf("without the password: %v", err)
	}
	client := redis.NewClient(&redis.Options{Network: "unix", Addr: socket, Password: "secret"})
	defer client.Close()
	if err := client.Ping(t.Context()).Err(); err != nil {
		t.Errorf("over the socket: %v", err)
	}
}
