package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// A sender that trickles its body holds nothing and delays nobody.
func TestTricklingBodyHoldsNothing(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), "redis_lock deploy\n"+up.proxy())
	body, typing := io.Pipe()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url, body)
	if err != nil {
		t.Fatal(err)
	}
	slow := make(chan int)
	go func() {
		response, err := newClient(t).Do(request)
		if err != nil {
			t.Error(err)
			slow <- 0
			return
		}
		response.Body.Close()
		slow <- response.StatusCode
	}()
	for range 5 {
		fmt.Fprint(typing, "a bit")
		post(t, c.url, 200)
	}
	typing.Close()
	if status := <-slow; status != 200 {
		t.Errorf("the slow sender got %d", status)
	}
}

// Bytes, length, unknown length and trailers reach the app as they were sent, below and beyond
// the buffer.
func TestBodiesArriveAsSent(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	type seen struct {
		sum     [sha256.Size]byte
		size    int64
		length  int64
		trailer http.Header
	}
	got := make(chan seen, 1)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		sum := sha256.New()
		n, err := io.Copy(sum, r.Body)
		if err != nil {
			t.Error(err)
		}
		got <- seen{[sha256.Size]byte(sum.Sum(nil)), n, r.ContentLength, r.Trailer}
	})
	c := startCaddy(t, onRedis(server, "buffer 1KiB", "fence_header X-Fence"), "redis_lock deploy\n"+up.proxy())
	for _, size := range []int{0, 1, 1023, 1024, 1025, 100_000, 5_000_000} {
		for _, chunked := range []bool{false, true} {
			content := bytes.Repeat([]byte("0123456789abcde\n"), size/16+1)[:size]
			var body io.Reader = bytes.NewReader(content)
			if chunked {
				body = io.MultiReader(body) // hides the length
			}
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url, body)
			if err != nil {
				t.Fatal(err)
			}
			wantLength := int64(size)
			if chunked {
				request.Trailer = http.Header{"X-Checksum": {"right"}, "X-Fence": {"1"}}
				wantLength = -1
			}
			response, err := newClient(t).Do(request)
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			s := <-got
			if s.sum != sha256.Sum256(content) || s.length != wantLength {
				t.Errorf("%d bytes, chunked %v: %d bytes and length %d arrived", size, chunked, s.size, s.length)
			}
			// reverse_proxy passes on only those trailers that have arrived when it begins.
			if chunked && size <= 1024 && s.trailer.Get("X-Checksum") != "right" {
				t.Errorf("%d bytes: trailers %v arrived", size, s.trailer)
			}
			if s.trailer.Get("X-Fence") != "" {
				t.Errorf("%d bytes: a fence of the client's arrived as a trailer", size)
			}
		}
	}
}

// dial speaks HTTP/1.1 by hand.
func dial(t *testing.T, c *caddy, request string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", c.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if _, err := io.WriteString(conn, strings.ReplaceAll(request, "\n", "\r\n")); err != nil {
		t.Fatal(err)
	}
	return conn
}

// A body that breaks off takes no lock, nor does one that Content-Length lies about, whether or not
// the lock's name is in it.
func TestBrokenBodyTakesNoLock(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"deploy", "{http.redis_lock.json.id}"} {
		server := redistest.Start(t)
		up := startUpstream(t, nil)
		c := startCaddy(t, onRedis(server), "request_body {\nmax_size 100\n}\nredis_lock "+name+"\n"+up.proxy()+outcomePage)
		for _, body := range []string{"Content-Length: 50\n\n", "Content-Length: 9000000000000000\n\n", "Transfer-Encoding: chunked\n\n8\n"} {
			conn := dial(t, c, "POST / HTTP/1.1\nHost: "+c.addr+"\n"+body+`{"id":1}`+"\n")
			conn.Close()
		}
		for _, bad := range []struct {
			body   string
			status int
		}{
			{"nonsense\n", 400},
			{"65\n" + `{"id":1}` + strings.Repeat(" ", 93) + "\n0\n\n", 413},
		} {
			conn := dial(t, c, "POST / HTTP/1.1\nHost: "+c.addr+"\nTransfer-Encoding: chunked\n\n"+bad.body)
			response, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			page, _ := io.ReadAll(response.Body)
			if response.StatusCode != bad.status || !strings.HasPrefix(string(page), "error ") {
				t.Errorf("body %q: status %d, page %q; want %d, error", bad.body, response.StatusCode, page, bad.status)
			}
		}
		wantStatus(t, do(t.Context(), newClient(t), http.MethodPost, c.url, strings.Repeat("x", 101)), 413)
		c.awaitQuiet(t)
		if commands := server.Commands(t); len(commands) != 0 {
			t.Errorf("commands %v were sent to Redis", commands)
		}
		if begun, _, _ := up.count(); begun != 0 {
			t.Errorf("%d requests reached the app", begun)
		}
		wantStatus(t, do(t.Context(), newClient(t), http.MethodPost, c.url, `{"id":1}`), 200)
	}
}

// Without a buffer, and for requests that are answered while they are sent, nothing is read
// before the lock is held: no "100 Continue" goes out.
func TestUnbufferedBodyIsNotAskedFor(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	for _, x := range []struct{ options, header string }{
		{"buffer 0", ""},
		{"", "Incremental: ?1\n"},
	} {
		c := startCaddy(t, onRedis(server, x.options, "wait 1m"), "redis_lock deploy\n"+up.proxy())
		server.Client.Set(t.Context(), "lock.deploy", server.Now(t).Unix()+3600, 0)
		conn := dial(t, c, "POST / HTTP/1.1\nHost: "+c.addr+"\nContent-Length: 2\nExpect: 100-continue\n"+x.header+"\n")
		await(t, "the request to wait", func() bool { return server.Commands(t)["evalsha"] > 3 })
		server.Client.Del(t.Context(), "lock.deploy")
		answers := bufio.NewReader(conn)
		line, err := answers.ReadString('\n')
		if err != nil || !strings.HasPrefix(line, "HTTP/1.1 100") {
			t.Fatalf("first line %q, %v", line, err)
		}
		if server.Client.Exists(t.Context(), "lock.deploy").Val() != 1 {
			t.Error("the body was asked for before the lock was held")
		}
		fmt.Fprint(conn, "ok")
		await(t, "the answer", func() bool { // after the app's own 100, which Caddy passes on
			line, err := answers.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			return strings.HasPrefix(line, "HTTP/1.1 200")
		})
	}
}

// A body beyond the buffer that does not come to its end is bounded by max_hold.
func TestMaxHoldBoundsTrickle(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "buffer 10", "max_hold 300ms"), "redis_lock deploy\n"+up.proxy()+outcomePage)
	conn := dial(t, c, "POST / HTTP/1.1\nHost: "+c.addr+"\nContent-Length: 1000\n\n"+strings.Repeat("x", 20))
	// The body, which never comes, is not waited for (net/http's own patience is a minute).
	_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	page, _ := io.ReadAll(response.Body)
	if response.StatusCode != 504 || !strings.HasPrefix(string(page), "max_hold ") {
		t.Errorf("status %d, page %q; want 504, max_hold", response.StatusCode, page)
	}
	noKeys(t, server)
	c.awaitQuiet(t)
}

// {http.request.body} behind the lock sees the body, and so does the app.
func TestBodyPlaceholder(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var got []byte
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) { got, _ = io.ReadAll(r.Body) })
	c := startCaddy(t, onRedis(server), "redis_lock deploy\n"+
		"reverse_proxy "+up.addr()+" {\nheader_up X-Body {http.request.body}\nheader_down X-Body {http.request.body}\n}")
	a := do(context.WithoutCancel(t.Context()), newClient(t), http.MethodPost, c.url, "payload")
	wantStatus(t, a, 200)
	if string(got) != "payload" || a.Header.Get("X-Body") != "payload" {
		t.Errorf("the app got %q, the placeholder says %q", got, a.Header.Get("X-Body"))
	}
}
