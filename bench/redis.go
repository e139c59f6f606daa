package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// A redisServer is the one server that everybody locks in.
type redisServer struct {
	*process
	address string
	client  *redis.Client // for looking at the server, and for nothing that is measured
}

func startRedis(ctx context.Context, dir string) (*redisServer, error) {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, fmt.Errorf("%w: `make bench` installs it", err)
	}
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	_, port, _ := strings.Cut(address, ":")
	p, err := startProcess(ctx, dir, address, program, "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
	if err != nil {
		return nil, err
	}
	return &redisServer{process: p, address: address, client: redis.NewClient(goRedis(address))}, nil
}

func (s *redisServer) stop() {
	_ = s.client.Close()
	s.kill()
}

// info returns a field of one of INFO's sections.
func (s *redisServer) info(ctx context.Context, section, field string) (string, error) {
	text, err := s.client.Info(ctx, section).Result()
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(text) {
		if value, found := strings.CutPrefix(line, field+":"); found {
			return strings.TrimSpace(value), nil
		}
	}
	return "", fmt.Errorf("INFO %s has no %s", section, field)
}

// cpuTime is the CPU time that the server has used so far.
func (s *redisServer) cpuTime(ctx context.Context) (time.Duration, error) {
	var sum float64
	for _, field := range []string{"used_cpu_user", "used_cpu_sys"} {
		value, err := s.info(ctx, "cpu", field)
		if err != nil {
			return 0, err
		}
		seconds, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("INFO cpu: %w", err)
		}
		sum += seconds
	}
	return time.Duration(sum * float64(time.Second)), nil
}

// forget empties the server, so that every round begins with the same one. Scripts stay.
func (s *redisServer) forget(ctx context.Context) error { return s.client.FlushAll(ctx).Err() }

// calls returns how many commands clients send while work runs. It listens with MONITOR, since
// the counters of INFO make no difference between what a client sends and what a script runs.
// That makes the server slow: nothing is timed meanwhile.
func (s *redisServer) calls(ctx context.Context, work func() error) (n int, err error) {
	connection, err := new(net.Dialer).DialContext(ctx, "tcp", s.address)
	if err != nil {
		return 0, err
	}
	defer connection.Close()
	if _, err := connection.Write([]byte("MONITOR\r\n")); err != nil {
		return 0, err
	}
	lines := bufio.NewReader(connection)
	if said, err := lines.ReadString('\n'); err != nil || said != "+OK\r\n" {
		return 0, fmt.Errorf("MONITOR: %q, %w", said, err)
	}

	// The marker is a command of our own, so that nothing said before it is missed.
	const marker = "bench: the end"
	counted := make(chan error, 1)
	count := 0 // read it when counted has spoken
	go func() {
		for {
			line, err := lines.ReadString('\n')
			if err != nil || strings.Contains(line, marker) {
				counted <- err
				return
			}
			if sentByClient(line) {
				count++
			}
		}
	}()
	workErr := work()
	if err := s.client.Echo(ctx, marker).Err(); err != nil {
		workErr = errors.Join(workErr, err, connection.Close()) // which ends the counting
	}
	err = errors.Join(workErr, <-counted)
	return count, err
}

// sentByClient tells what a line of MONITOR is about, such as
//
//	+1700000000.000000 [0 127.0.0.1:50000] "evalsha" "..."
//	+1700000000.000000 [0 lua] "set" "..."
//
// Commands by which a connection introduces itself are not counted.
func sentByClient(line string) bool {
	_, rest, _ := strings.Cut(line, " [")
	source, command, found := strings.Cut(rest, "] ")
	if !found || strings.HasSuffix(source, " lua") {
		return false
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(command, `"`), `"`)
	switch strings.ToLower(name) {
	case "hello", "client", "auth", "select":
		return false
	}
	return true
}
