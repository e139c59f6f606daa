package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"
)

// A process is a server that the benchmark has started for itself, in a directory of its own.
type process struct {
	cmd   *exec.Cmd
	log   bytes.Buffer
	ended chan struct{} // closed when it has ended, with log complete
}

// startProcess starts a server and returns when it accepts connections on address.
func startProcess(ctx context.Context, dir, address, program string, args ...string) (*process, error) {
	p := &process{cmd: exec.CommandContext(ctx, program, args...), ended: make(chan struct{})}
	p.cmd.Dir = dir
	p.cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait() // killed, most of the time
	}()
	if err := p.await(ctx, address); err != nil {
		p.kill()
		return nil, fmt.Errorf("%s: %w:\n%s", filepath.Base(program), err, p.log.Bytes())
	}
	return p, nil
}

func (p *process) await(ctx context.Context, address string) error {
	deadline := time.Now().Add(30 * time.Second)
	for time.Now().Before(deadline) {
		connection, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err == nil {
			return connection.Close()
		}
		select {
		case <-p.ended:
			return errors.New("ended at once")
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(5 * time.Millisecond):
		}
	}
	return fmt.Errorf("does not listen on %s", address)
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

var (
	givenMu sync.Mutex
	given   = make(map[string]bool)
)

// freeAddress returns a loopback address that nobody listens on, and that it has not returned
// before. Its port is below those that systems choose by themselves: such a one could be taken
// by a client's connection before its server starts.
func freeAddress() (string, error) {
	givenMu.Lock()
	defer givenMu.Unlock()
	for range 1000 {
		address := fmt.Sprintf("127.0.0.1:%d", 10_000+rand.N(22_000))
		if given[address] {
			continue
		}
		if listener, err := net.Listen("tcp", address); err == nil {
			given[address] = true
			return address, listener.Close()
		}
	}
	return "", errors.New("no free port on 127.0.0.1")
}
