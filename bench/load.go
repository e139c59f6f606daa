package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A visitor sends one request after the other on a connection that stays open. It is no HTTP
// client: it sends bytes that hardly change and reads no more of the answer than it must. What
// a client uses of the CPU makes all sites alike.
type visitor struct {
	net.Conn
	answers *bufio.Reader
	request []byte
	id      []byte // the part of request that is the number in its X-Id
}

const bodySize = 1024

// newVisitor connects. limit bounds all that it will do.
func newVisitor(ctx context.Context, address, method string, limit time.Duration) (*visitor, error) {
	connection, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	if err := connection.SetDeadline(time.Now().Add(limit)); err != nil {
		return nil, errors.Join(err, connection.Close())
	}
	head := method + " /hooks/deploy HTTP/1.1\r\nHost: " + address + "\r\nX-Id: "
	request := []byte(head + "0000000000000000\r\n")
	if method == "POST" {
		request = fmt.Appendf(request, "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n\"%s\"",
			bodySize, strings.Repeat("x", bodySize-2))
	} else {
		request = append(request, "\r\n"...)
	}
	return &visitor{connection, bufio.NewReader(connection), request, request[len(head):][:16]}, nil
}

var lastID atomic.Uint64

// visitAs sends a request with a number, and waits for the whole answer, which must be a 200.
func (v *visitor) visitAs(id uint64) error {
	for i := len(v.id) - 1; i >= 0; i, id = i-1, id/10 {
		v.id[i] = '0' + byte(id%10)
	}
	if _, err := v.Write(v.request); err != nil {
		return err
	}
	status, length, _, err := readHead(v.answers)
	if err != nil {
		return err
	}
	if !bytes.HasPrefix(status, []byte("HTTP/1.1 200 ")) {
		return fmt.Errorf("answered with %q", status)
	}
	_, err = v.answers.Discard(length)
	return err
}

// visit sends a request with a number that no other one has.
func (v *visitor) visit() error { return v.visitAs(lastID.Add(1)) }

// readHead reads a request or an answer up to its body. Its first line is cut off at 64 bytes.
func readHead(r *bufio.Reader) (first []byte, length int, id uint64, err error) {
	length = -1
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return first, 0, 0, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if first == nil {
			first = append(make([]byte, 0, 64), line[:min(len(line), 64)]...)
			continue
		}
		if len(line) == 0 {
			break
		}
		name, value, _ := bytes.Cut(line, []byte(": "))
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			length, err = strconv.Atoi(string(value))
		case bytes.EqualFold(name, []byte("X-Id")):
			id, err = strconv.ParseUint(string(value), 10, 64)
		case bytes.EqualFold(name, []byte("Transfer-Encoding")):
			err = errors.New("a body of unknown length")
		}
		if err != nil {
			return first, 0, 0, err
		}
	}
	return first, max(length, 0), id, nil
}

// visitors connects n of them; what goes wrong closes those that are connected.
func visitors(ctx context.Context, addresses []string, method string, n int, limit time.Duration) ([]*visitor, error) {
	all := make([]*visitor, 0, n)
	for i := range n {
		v, err := newVisitor(ctx, addresses[i%len(addresses)], method, limit)
		if err != nil {
			leave(all)
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

func leave(all []*visitor) {
	for _, v := range all {
		_ = v.Close()
	}
}

// throughput returns the requests per second that an address answers, on a number of
// connections that are never idle.
func throughput(ctx context.Context, address, method string, connections int, length time.Duration) (float64, error) {
	all, err := visitors(ctx, []string{address}, method, connections, length+patience)
	if err != nil {
		return 0, err
	}
	defer leave(all)
	// The first requests open connections behind the site.
	if _, err := visitUntil(all, time.Now().Add(length/5)); err != nil {
		return 0, err
	}
	begin := time.Now()
	n, err := visitUntil(all, begin.Add(length))
	return float64(n) / time.Since(begin).Seconds(), err
}

func visitUntil(all []*visitor, until time.Time) (n int, err error) {
	counts := make([]int, len(all))
	errs := make([]error, len(all))
	var running sync.WaitGroup
	for i, v := range all {
		running.Go(func() {
			for count := 0; ; count++ {
				if time.Now().After(until) {
					counts[i] = count
					return
				}
				if errs[i] = v.visit(); errs[i] != nil {
					return
				}
			}
		})
	}
	running.Wait()
	for _, count := range counts {
		n += count
	}
	return n, firstOf(errs)
}

// An upstream is the app behind Caddy, as lean as the visitors. It answers after work, if any,
// which gets the number in the request's X-Id.
type upstream struct {
	listener net.Listener
	work     func(id uint64)

	running     sync.WaitGroup
	mu          sync.Mutex
	connections []net.Conn
	closed      bool
}

func startUpstream(work func(id uint64)) (*upstream, error) {
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	u := &upstream{listener: listener, work: work}
	u.running.Go(u.accept)
	return u, nil
}

func (u *upstream) address() string { return u.listener.Addr().String() }

func (u *upstream) accept() {
	for {
		connection, err := u.listener.Accept()
		if err != nil {
			return // closed
		}
		if !u.keep(connection) {
			_ = connection.Close()
			return
		}
		u.running.Go(func() {
			// Without an answer Caddy says 502, and the visitor complains.
			_ = u.serve(connection)
			_ = connection.Close()
		})
	}
}

// keep remembers a connection, so that close ends it.
func (u *upstream) keep(connection net.Conn) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.connections = append(u.connections, connection)
	return !u.closed
}

func (u *upstream) serve(connection net.Conn) error {
	response := []byte("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok")
	requests := bufio.NewReader(connection)
	for {
		_, length, id, err := readHead(requests)
		if err != nil {
			return err
		}
		if _, err := requests.Discard(length); err != nil {
			return err
		}
		if u.work != nil {
			u.work(id)
		}
		if _, err := connection.Write(response); err != nil {
			return err
		}
	}
}

// close ends all connections, too.
func (u *upstream) close() {
	_ = u.listener.Close()
	u.mu.Lock()
	u.closed = true
	for _, connection := range u.connections {
		_ = connection.Close()
	}
	u.mu.Unlock()
	u.running.Wait()
}
