package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// namesAnswer makes a proxy tell the lock's name.
const namesAnswer = " {\nheader_down X-Name {http.redis_lock.name}\n}"

// What a name took from the body is there for all who ask later: the app, handlers behind one that
// has changed the body, error pages. The body, its length or the lack of one, and its trailers reach
// the app as they were sent.
func TestNamesFromBodies(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	push, err := os.ReadFile("../../testdata/webhooks/github_push.json")
	if err != nil {
		t.Fatal(err)
	}
	type seen struct {
		body, field, checksum string
		length                int64
	}
	got := make(chan seen, 1)
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		got <- seen{string(body), r.Header.Get("X-Field"), r.Trailer.Get("X-Checksum"), r.ContentLength}
	})
	c := startCaddy(t, onRedis(server), `redis_lock {
		name {http.redis_lock.json.repository.full_name} {http.redis_lock.form.CallSid}
	}
	handle /changed {
		request_body {
			set changed
		}
		reverse_proxy `+up.addr()+` {
			header_up X-Field {http.redis_lock.json.repository.full_name}{http.redis_lock.form.CallSid}
		}
	}
	handle /broken {
		error 500
	}
	reverse_proxy `+up.addr()+` {
		header_up X-Field {http.redis_lock.name}
	}
	handle_errors {
		respond {http.redis_lock.name},{http.redis_lock.json.repository.full_name}{http.redis_lock.form.CallSid}
	}`)
	for _, webhook := range []struct{ contentType, body, field string }{
		{"application/json", string(push), "octo-org/octo-repo"},
		{"application/x-www-form-urlencoded", "CallSid=CA1&Body=a+b", "CA1"},
	} {
		header := []string{"Content-Type", webhook.contentType}
		for _, chunked := range []bool{false, true} {
			want := seen{webhook.body, webhook.field, "", int64(len(webhook.body))}
			var body io.Reader = strings.NewReader(webhook.body)
			if chunked {
				body = io.MultiReader(body) // hides the length
				want.checksum, want.length = "right", -1
			}
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url, body)
			if err != nil {
				t.Fatal(err)
			}
			request.Header.Set("Content-Type", webhook.contentType)
			if chunked {
				request.Trailer = http.Header{"X-Checksum": {"right"}}
			}
			response, err := newClient(t).Do(request)
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			if s := <-got; s != want {
				t.Errorf("chunked %v: the app got %+v, want %+v", chunked, s, want)
			}
		}
		wantStatus(t, do(t.Context(), newClient(t), http.MethodPost, c.url+"/changed", webhook.body, header...), 200)
		if s := <-got; s.body != "changed" || s.field != webhook.field {
			t.Errorf("behind a change of the body: the app got %+v", s)
		}
		a := do(t.Context(), newClient(t), http.MethodPost, c.url+"/broken", webhook.body, header...)
		wantStatus(t, a, 500)
		if a.body != webhook.field+","+webhook.field {
			t.Errorf("error page %q", a.body)
		}
	}
}

// Bodies without a name, or with more than one, by mistake or by intent. Caddy serves on.
func TestBodiesWithoutName(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "buffer 16MiB"), `redis_lock /next {
		name {http.redis_lock.json.id} {http.redis_lock.form.id} next
	}
	redis_lock /only {
		name {http.redis_lock.json.id} {http.redis_lock.form.id}
	}
	`+up.proxy()+namesAnswer+outcomePage)
	client := newClient(t)
	send := func(path, contentType, body string) answer {
		return do(t.Context(), client, http.MethodPost, c.url+path, body, "Content-Type", contentType)
	}
	deep := strings.Repeat(`{"id":`, 1e6) + "1" + strings.Repeat("}", 1e6)
	const json, form = "application/json", "application/x-www-form-urlencoded"
	for _, bad := range []struct{ what, contentType, body string }{
		{"nothing", json, ""},
		{"not JSON", json, "id=1"},
		{"JSON that breaks off", json, `{"id":1`},
		{"nested deeply", json, deep},
		{"nested deeply beside it", json, `{"id":1,"x":` + deep + "}"},
		{"nested deeply without end", json, strings.Repeat("[", 1e6)},
		{"not UTF-8", json, "{\"id\":\"\xff\"}"},
		{"half a surrogate pair", json, `{"id":"\udc00"}`},
		{"twice", json, `{"id":1,"id":2}`},
		{"null", json, `{"id":null}`},
		{"multipart", "multipart/form-data; boundary=b", "--b\r\nContent-Disposition: form-data; name=\"id\"\r\n\r\n1\r\n--b--\r\n"},
		{"form without its Content-Type", "text/plain", "id=1"},
		{"form with two values", form, "id=1&id=2"},
		{"form that is not UTF-8", form, "id=%ff"},
		{"form of many fields", form, "id=1" + strings.Repeat("&a=b", 1e6)},
	} {
		a := send("/only", bad.contentType, bad.body)
		if a.err != nil || a.StatusCode != 400 || !strings.HasPrefix(a.body, "no_name ") {
			t.Errorf("%s: %+v, want 400 and no_name", bad.what, a)
		}
		if a := send("/next", bad.contentType, bad.body); a.err != nil || a.StatusCode != 200 || a.Header.Get("X-Name") != "next" {
			t.Errorf("%s: %+v, want 200 and the next name", bad.what, a)
		}
		if a := send("/only", json, `{"id":1}`); a.err != nil || a.StatusCode != 200 || a.Header.Get("X-Name") != "1" {
			t.Errorf("after %s: %+v, want 200 and the name 1", bad.what, a)
		}
	}
	noKeys(t, server)
}

// Bodies far beyond the buffer have no name, and are not kept in memory to look for one.
func TestLargeBodiesHaveNoName(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server), `redis_lock /next/* {
		name {http.redis_lock.json.id} {path}
	}
	redis_lock /only/* {
		name {http.redis_lock.json.id}
	}
	`+up.proxy()+namesAnswer)
	const many, size = 4, 64 << 20
	large := func(size int64) io.Reader {
		const begin, end = `{"id":1,"x":"`, `"}`
		return io.MultiReader(strings.NewReader(begin), io.LimitReader(xs{}, size-int64(len(begin+end))), strings.NewReader(end))
	}
	sendAll := func(size int64) {
		var senders sync.WaitGroup
		for n := range many {
			senders.Go(func() {
				path := fmt.Sprintf("/next/%d", n)
				request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url+path, large(size))
				if err != nil {
					t.Error(err)
					return
				}
				response, err := newClient(t).Do(request)
				if err != nil {
					t.Error(err)
					return
				}
				response.Body.Close()
				if name := response.Header.Get("X-Name"); response.StatusCode != 200 || name != path {
					t.Errorf("status %d, name %q; want 200, %s", response.StatusCode, name, path)
				}
			})
			conn := dial(t, c, fmt.Sprintf("POST /only/%d HTTP/1.1\nHost: %s\nContent-Length: %d\n\n", n, c.addr, size))
			senders.Go(func() { _, _ = io.Copy(conn, large(size)) }) // Caddy, which has answered, cuts it off
			senders.Go(func() {
				response, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil || response.StatusCode != 400 {
					t.Errorf("%v, %v; want 400", response, err)
				}
			})
		}
		senders.Wait()
	}
	sendAll(4 << 20) // beyond the buffer: what a larger one adds is what counts
	before := c.peakMemory(t)
	sendAll(size)
	if grown := c.peakMemory(t) - before; grown > size {
		t.Errorf("Caddy's memory grew by %d MiB, with %d bodies of %d MiB", grown>>20, many, size>>20)
	}
	wantStatus(t, do(t.Context(), newClient(t), http.MethodPost, c.url+"/only/0", `{"id":1}`), 200)
}

// xs is a text without end.
type xs struct{}

func (xs) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

// peakMemory is the most that the process ever had in memory.
func (c *caddy) peakMemory(t *testing.T) (size int) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	_, peak, _ := strings.Cut(string(status), "VmHWM:")
	if _, err := fmt.Sscanf(peak, "%d kB", &size); err != nil {
		t.Fatalf("%v in %s", err, status)
	}
	return size << 10
}
