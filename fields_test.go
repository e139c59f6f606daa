package redislock

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

const (
	jsonType      = "application/json"
	formType      = "application/x-www-form-urlencoded"
	multipartType = "multipart/form-data; boundary=b"
)

func TestFieldsOfTemplates(t *testing.T) {
	for _, c := range []struct {
		templates []string
		json      map[string][]string
		form      map[string]string
	}{
		{templates: []string{"deploy", "{http.request.host}", "{http.redis_lock.name}", "json.a"}},
		{templates: []string{"x-{http.redis_lock.json.a.0.b}-{http.redis_lock.form.To}", "{http.redis_lock.json.c}", "{http.redis_lock.json.c}"},
			json: map[string][]string{"http.redis_lock.json.a.0.b": {"a", "0", "b"}, "http.redis_lock.json.c": {"c"}},
			form: map[string]string{"http.redis_lock.form.To": "To"}},
		{templates: []string{`\{http.redis_lock.json.a\} {http.redis_lock.json.a`}},
		{templates: []string{`{http.redis_lock.json.a\.b.c\\d.e\}\{}`},
			json: map[string][]string{`http.redis_lock.json.a\.b.c\\d.e\}\{`: {"a.b", `c\d`, "e}{"}}},
		{templates: []string{"{http.redis_lock.json.a:default}"},
			json: map[string][]string{"http.redis_lock.json.a:default": {"a:default"}}},
		{templates: []string{`{http.redis_lock.form.a.b..c}{http.redis_lock.form.data[id\}]}`},
			form: map[string]string{"http.redis_lock.form.a.b..c": "a.b..c", `http.redis_lock.form.data[id\}]`: "data[id}]"}},
	} {
		f, err := newFields(c.templates)
		if err != nil || !maps.EqualFunc(f.json, c.json, func(a, b []string) bool { return reflect.DeepEqual(a, b) }) || !maps.Equal(f.form, c.form) {
			t.Errorf("%q: %q %q, %v", c.templates, f.json, f.form, err)
		}
		if f.none() != (len(c.json)+len(c.form) == 0) {
			t.Errorf("%q: none is %v", c.templates, f.none())
		}
	}
}

// github is the body of a push, of about the usual size.
func github(tb testing.TB) []byte {
	tb.Helper()
	content, err := os.ReadFile("testdata/webhooks/github_push.json")
	if err != nil {
		tb.Fatal(err)
	}
	var push map[string]any
	if err := json.Unmarshal(content, &push); err != nil {
		tb.Fatal(err)
	}
	commit := push["commits"].([]any)[0]
	for len(content) < 9<<10 {
		push["commits"] = append(push["commits"].([]any), commit)
		if content, err = json.Marshal(push); err != nil {
			tb.Fatal(err)
		}
	}
	return content
}

func TestJSONFields(t *testing.T) {
	deep := strings.Repeat(`{"a":`, 1e6) + "1" + strings.Repeat("}", 1e6)
	for _, c := range []struct{ body, path, want string }{
		{string(github(t)), "repository.full_name", "octo-org/octo-repo"},
		{string(github(t)), "repository.owner.id", "6811672"},
		{string(github(t)), "commits.1.added.0", "docs/日本語.md"},
		{`{"object_kind":"push","project_id":15,"project":{"id":15,"path_with_namespace":"mike/diaspora"}}`, "project.path_with_namespace", "mike/diaspora"},
		{`{"object_kind":"push","project_id":15,"project":{"id":15,"path_with_namespace":"mike/diaspora"}}`, "project_id", "15"},
		{`{"push":{"changes":[{"new":{"name":"main","type":"branch"},"old":null}]},"repository":{"full_name":"team/repo"}}`, "repository.full_name", "team/repo"},
		{`{"push":{"changes":[{"new":{"name":"main","type":"branch"},"old":null}]},"repository":{"full_name":"team/repo"}}`, "push.changes.0.new.name", "main"},
		{`{"push":{"changes":[{"new":{"name":"main","type":"branch"},"old":null}]},"repository":{"full_name":"team/repo"}}`, "push.changes.0.old.name", ""},
		{`{"type":"charge.refunded","data":{"object":{"id":"ch_1","customer":null}}}`, "data.object.customer", ""},
		{`{"type":"charge.refunded","data":{"object":{"id":"ch_1","customer":null}}}`, "data.object.id", "ch_1"},
		{`{"team_id":"T061EG9R6","event":{"type":"message","channel":"C2147483705","ts":"1355517523.000005"}}`, "team_id", "T061EG9R6"},
		{`{"team_id":"T061EG9R6","event":{"type":"message","channel":"C2147483705","ts":"1355517523.000005"}}`, "event.channel", "C2147483705"},

		{`{"a":12345678901234567890}`, "a", "12345678901234567890"},
		{`{"a":9007199254740993}`, "a", "9007199254740993"},
		{`{"a": -1.50e+3 }`, "a", "-1.50e+3"},
		{`{"a":true,"b":false}`, "a", "true"},
		{`{"a":true,"b":false}`, "b", "false"},
		{`{"a":""}`, "a", ""},
		{`{"a":{"b":1}}`, "a", ""},
		{`{"a":[1]}`, "a", ""},
		{`{"a":"b"}`, "a.b", ""},
		{`{"a":"b"}`, "a.0", ""},
		{`{"a":"b"}`, "c", ""},
		{"\r\n {\"a\" :\t\"b\"} \n", "a", "b"},
		{`{"a\u002eb":"\u0041\n\ud83d\ude00\/"}`, `a\.b`, "A\n😀/"},
		{`{"a.b":"key","a":{"b":"keys"}}`, `a\.b`, "key"},
		{`{"a.b":"key","a":{"b":"keys"}}`, "a.b", "keys"},
		{`{"a*":1,"ab":2,"#":3,"@this":4,"a|b":5}`, "a*", "1"},
		{`{"ab":2}`, "a*", ""},
		{`{"a":[1,2]}`, "a.#", ""},
		{`{"a":[1,2]}`, "@this.a.0", ""},
		{`{"a":[{"b":1}]}`, "a.#(b==1)", ""},

		{`["a","b"]`, "1", "b"},
		{`["a","b"]`, "2", ""},
		{`["a","b"]`, "-1", ""},
		{`["a","b"]`, "01", ""},
		{`["a","b"]`, "length", ""},
		{`["a","b"]`, "18446744073709551617", ""},
		{`{"1":"key"}`, "1", "key"},
		{`[[],[1,[2]]]`, "1.1.0", "2"},

		{`{"a":1,"a":2}`, "a", ""},
		{`{"a":1,"a":1}`, "a", ""},
		{`{"a":1,"\u0061":2}`, "a", ""},
		{`{"a":{"b":1},"a":{"c":2}}`, "a.b", ""},
		{`{"b":1,"b":2,"a":3}`, "a", "3"},

		{"{\"a\":\"\xff\",\"b\":1}", "a", ""},
		{"{\"a\":\"\xff\",\"b\":1}", "b", "1"},
		{"{\"a\xff\":1}", "a", ""},
		{`{"a":"\ud800"}`, "a", ""},
		{`{"a":"\ud800\ud800"}`, "a", ""},
		{"{\"a\":\"\ufffd\"}", "a", ""},

		{"", "a", ""},
		{"a", "a", ""},
		{`{"a":1`, "a", ""},
		{`{"a":1}{"a":2}`, "a", ""},
		{`{"a":01}`, "a", ""},
		{`{"a":1,}`, "a", ""},
		{"\ufeff" + `{"a":1}`, "a", ""},
		{`a=1`, "a", ""},
		{`{"b":1,` + deep[1:], "b", ""},
		{deep, "a", ""},
		{strings.Repeat("[", 1e6), "0", ""},
		{`{"a":1,"b":` + strings.Repeat("[", 9000) + strings.Repeat("]", 9000) + `}`, "a", "1"},
	} {
		placeholder := "http.redis_lock.json." + c.path
		if got := resolve(t, placeholder, "", []byte(c.body)); got != c.want {
			t.Errorf("%s in %.80q: %q, want %q", c.path, c.body, got, c.want)
		}
	}
}

func TestFormFields(t *testing.T) {
	const twilio = "ToCountry=US&SmsMessageSid=SM1&NumMedia=0&CallSid=CA1234567890ABCDE&Caller=%2B14158675310&Body=a+b%26c"
	for _, c := range []struct{ contentType, body, field, want string }{
		{formType, twilio, "CallSid", "CA1234567890ABCDE"},
		{formType, twilio, "Caller", "+14158675310"},
		{"Application/X-WWW-Form-URLencoded; charset=UTF-8", twilio, "Body", "a b&c"},
		{formType, twilio, "callsid", ""},
		{formType, "payload=%7B%22a%22%3A1%7D", "payload", `{"a":1}`},
		{formType, "data%5Bid%5D=1&a.b=2", "data[id]", "1"},
		{formType, "data%5Bid%5D=1&a.b=2", "a.b", "2"},
		{formType, "a=&b", "a", ""},
		{formType, "a=&b", "b", ""},
		{formType, "a=1&a=2", "a", ""},
		{formType, "a=1&a=", "a", ""},
		{formType, "a=1&b=2&a=1", "a", "1"},
		{formType, "a=%ff", "a", ""},
		{formType, "a=\xff", "a", ""},
		{formType, "a=%zz&b=2&c=3;d=4", "a", ""},
		{formType, "a=%zz&b=2&c=3;d=4", "b", "2"},
		{formType, "a=1" + strings.Repeat("&b", 1e5), "a", ""},
		{"", twilio, "CallSid", ""},
		{jsonType, twilio, "CallSid", ""},
		{"text/plain", twilio, "CallSid", ""},
		{multipartType, "--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n--b--\r\n", "a", ""},
		{multipartType, "a=1", "a", ""},
		{formType, "", "a", ""},
	} {
		placeholder := "http.redis_lock.form." + c.field
		if got := resolve(t, placeholder, c.contentType, []byte(c.body)); got != c.want {
			t.Errorf("%s in %.80q (%s): %q, want %q", c.field, c.body, c.contentType, got, c.want)
		}
	}
}

// resolve returns what a placeholder becomes for a body.
func resolve(t *testing.T, placeholder, contentType string, body []byte) string {
	t.Helper()
	f, err := newFields([]string{"{" + placeholder + "}"})
	if err != nil {
		t.Fatal(err)
	}
	repl := caddy.NewReplacer()
	f.set(repl, http.Header{"Content-Type": {contentType}}, body)
	value, set := repl.Get(placeholder)
	if !set {
		t.Fatalf("%s was not set", placeholder)
	}
	return value.(string)
}

// A placeholder's value outlives the body, and does not keep it in memory.
func TestFieldsAreCopies(t *testing.T) {
	f, err := newFields([]string{"{http.redis_lock.json.a}{http.redis_lock.form.a}"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ placeholder, content string }{
		{"http.redis_lock.json.a", `{"a":"value","b":"%s"}`},
		{"http.redis_lock.form.a", "a=value&b=%s"},
	} {
		const many, size = 32, 1 << 20
		inUse := func() uint64 {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		before := inUse()
		repls := make([]*caddy.Replacer, many)
		for i := range repls {
			body := fmt.Appendf(nil, c.content, strings.Repeat("x", size))
			repls[i] = caddy.NewReplacer()
			f.set(repls[i], http.Header{"Content-Type": {formType}}, body)
			clear(body)
		}
		if grown := int64(inUse()) - int64(before); grown > many*size/4 {
			t.Errorf("%s: %d bytes in use for %d values", c.placeholder, grown, many)
		}
		for _, repl := range repls {
			if value, _ := repl.GetString(c.placeholder); value != "value" {
				t.Fatalf("%s became %q", c.placeholder, value)
			}
		}
	}
}

// unreadable is a body that must not be read.
type unreadable struct{ t *testing.T }

func (u unreadable) Read([]byte) (int, error) {
	u.t.Error("the body was read")
	return 0, io.EOF
}
func (unreadable) Close() error { return nil }

func TestNamesWithoutFieldsCostNothing(t *testing.T) {
	h := newHandler(t, &Handler{Name: []string{"{http.request.host}", `\{http.redis_lock.json.a\}`}})
	r, _ := newRequest(http.MethodPost, "/")
	r.Body, r.ContentLength = unreadable{t}, 10
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if n := testing.AllocsPerRun(100, func() { _ = h.readFields(r, repl) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// The way of a request with a body through h. Its outcome, its name, the error's status (0: none).
func serveBody(t *testing.T, h *Handler, r *http.Request, next caddyhttp.HandlerFunc) (outcome, name string, status int) {
	t.Helper()
	w := httptest.NewRecorder()
	repl := caddy.NewReplacer()
	err := h.ServeHTTP(w, caddyhttp.PrepareRequest(r, repl, w, nil), next)
	if herr, ok := err.(caddyhttp.HandlerError); ok {
		status = herr.StatusCode
	} else if err != nil {
		t.Errorf("not an error for Caddy: %v", err)
	}
	outcome, _ = repl.GetString("http.redis_lock.outcome")
	name, _ = repl.GetString("http.redis_lock.name")
	return outcome, name, status
}

// Names from the body; those that do not resolve leave it to the next one. The body goes on as it came.
func TestNamesFromBody(t *testing.T) {
	stripe, err := os.ReadFile("testdata/webhooks/stripe_event.json")
	if err != nil {
		t.Fatal(err)
	}
	noCustomer := bytes.Replace(stripe, []byte(`"cus_NffrFeUfNV2Hib"`), []byte("null"), 1)
	names := []string{
		"{http.redis_lock.json.data.object.customer}", "{http.redis_lock.json.data.object.id}",
		"call {http.redis_lock.form.CallSid}",
	}
	withHost := []string{"{http.redis_lock.json.data.object.id}", "{http.request.host}"}
	for _, c := range []struct {
		what        string
		names       []string
		contentType string
		body        []byte
		change      func(h *Handler, r *http.Request)
		want        string // the name; "": none resolves
	}{
		{"json", names, jsonType, stripe, nil, "cus_NffrFeUfNV2Hib"},
		{"json, of unknown length", names, jsonType, stripe, func(_ *Handler, r *http.Request) { r.ContentLength = -1 }, "cus_NffrFeUfNV2Hib"},
		{"json with a wrong Content-Type", names, formType, stripe, nil, "cus_NffrFeUfNV2Hib"},
		{"null", names, jsonType, noCustomer, nil, "pi_3NG8Du2eZvKYlo2C1tC9vXWy"},
		{"form", names, formType, []byte("CallSid=CA1"), nil, "call CA1"},
		{"neither", names, "text/plain", []byte("CallSid=CA1"), nil, ""},
		{"neither, with another name", withHost, "text/plain", []byte("hello"), nil, "example.com"},
		{"no body", names, jsonType, nil, nil, ""},
		{"together with the body", []string{"{http.redis_lock.json.a}{http.request.body}"}, jsonType, []byte(`{"a":1}`), nil, `1{"a":1}`},
		{"the buffer is just enough", names, jsonType, stripe, func(h *Handler, _ *http.Request) { *h.Buffer = int64(len(stripe)) }, "cus_NffrFeUfNV2Hib"},
		{"beyond the buffer", names, jsonType, stripe, func(h *Handler, _ *http.Request) { *h.Buffer = int64(len(stripe)) - 1 }, ""},
		{"beyond the buffer, with another name", withHost, jsonType, stripe, func(h *Handler, _ *http.Request) { *h.Buffer = 10 }, "example.com"},
		{"the buffer ends behind whole JSON", withHost, jsonType, []byte(`{"data":{"object":{"id":1}}} {}`), func(h *Handler, _ *http.Request) { *h.Buffer = 28 }, "example.com"},
		{"Incremental", withHost, jsonType, stripe, func(_ *Handler, r *http.Request) { r.Header.Set("Incremental", "?1") }, "example.com"},
		{"CONNECT", withHost, jsonType, stripe, func(h *Handler, r *http.Request) { h.Methods, r.Method = []string{unsafe}, "CONNECT" }, "example.com"},
	} {
		t.Run(c.what, func(t *testing.T) {
			for _, onNoName := range []string{reject, pass} {
				h := newHandler(t, &Handler{Name: c.names, OnNoName: onNoName})
				r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(c.body))
				r.Header.Set("Content-Type", c.contentType)
				if c.change != nil {
					c.change(h, r)
				}
				length := r.ContentLength
				ran := false
				outcome, name, status := serveBody(t, h, r, func(_ http.ResponseWriter, r *http.Request) error {
					ran = true
					if got, err := io.ReadAll(r.Body); err != nil || !bytes.Equal(got, c.body) || r.ContentLength != length {
						t.Errorf("%d bytes, %v, Content-Length %d; want %d bytes and %d", len(got), err, r.ContentLength, len(c.body), length)
					}
					return nil
				})
				wantOutcome, wantStatus := outcomeAcquired, 0
				switch {
				case c.want == "" && onNoName == pass:
					wantOutcome = outcomePassed
				case c.want == "":
					wantOutcome, wantStatus = outcomeNoName, http.StatusBadRequest
				}
				if outcome != wantOutcome || name != c.want || status != wantStatus || ran != (wantStatus == 0) {
					t.Errorf("outcome %s, name %q, status %d, ran %v; want %s, %q", outcome, name, status, ran, wantOutcome, c.want)
				}
			}
		})
	}
}

// An inner lock's name is from the same body, which still reaches the app; what was set for
// the outer one does not stick.
func TestNestedNamesFromBody(t *testing.T) {
	outer := newHandler(t, &Handler{Name: []string{"{http.redis_lock.json.a}"}})
	same := newHandler(t, &Handler{Name: []string{"{http.redis_lock.json.a}"}, Buffer: new(int64(1))})
	inner := newHandler(t, &Handler{Name: []string{"{http.redis_lock.json.a}"}, Prefix: "inner."})
	const body = `{"a":"x"}`
	ran := false
	_, name, status := serveBody(t, outer, httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body)), func(w http.ResponseWriter, r *http.Request) error {
		return same.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			return inner.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
				ran = true
				if got, err := io.ReadAll(r.Body); err != nil || string(got) != body {
					t.Errorf("%q, %v arrived", got, err)
				}
				return nil
			}))
		}))
	})
	if name != "x" || status != 0 || !ran {
		t.Errorf("name %q, status %d, ran %v", name, status, ran)
	}

	other := newHandler(t, &Handler{Name: []string{"{http.redis_lock.json.a}", "none"}, Prefix: "inner."})
	_, name, status = serveBody(t, outer, httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body)), func(w http.ResponseWriter, r *http.Request) error {
		r.Body = io.NopCloser(strings.NewReader("changed"))
		r.ContentLength = int64(len("changed"))
		return other.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil }))
	})
	if name != "none" || status != 0 {
		t.Errorf("after the body has changed: name %q, status %d", name, status)
	}
}

// What was read for the name is not read again for the lock.
func TestBodyIsBufferedOnce(t *testing.T) {
	for _, limit := range []int64{4, 100} {
		h := newHandler(t, &Handler{Name: []string{"{http.redis_lock.json.a}"}, Buffer: &limit})
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(`{"a":1}`))
		if err := h.readFields(r, caddy.NewReplacer()); err != nil {
			t.Fatal(err)
		}
		body := r.Body
		if err := h.bufferBody(r); err != nil || r.Body != body {
			t.Errorf("buffer %d: %T became %T, %v", limit, body, r.Body, err)
		}
	}
}

// A body that breaks off, or is larger than allowed, has no name and takes no lock.
func TestBrokenBodyHasNoName(t *testing.T) {
	broken := errors.New("connection reset")
	for want, err := range map[int]error{
		http.StatusBadRequest:            broken,
		http.StatusRequestEntityTooLarge: caddyhttp.Error(http.StatusRequestEntityTooLarge, broken),
	} {
		h := newHandler(t, &Handler{Name: []string{"{http.redis_lock.json.a}", "fallback"}, OnNoName: pass})
		r := httptest.NewRequest(http.MethodPost, "/", io.MultiReader(strings.NewReader(`{"a":1}`), failing{err}))
		outcome, name, status := serveBody(t, h, r, func(http.ResponseWriter, *http.Request) error {
			t.Error("it ran")
			return nil
		})
		if outcome != outcomeError || name != "" || status != want {
			t.Errorf("outcome %s, name %q, status %d; want error, %d", outcome, name, status, want)
		}
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// wantJSON is what a path leads to, found token by token. It reads one value; wanted: the path
// goes through it.
func wantJSON(d *json.Decoder, path []string, wanted bool) (value string) {
	token, err := d.Token()
	if err != nil {
		return ""
	}
	end := wanted && len(path) == 0
	switch token := token.(type) {
	case json.Delim:
		found := 0
		for i := 0; d.More(); i++ {
			key := strconv.Itoa(i)
			if token == '{' {
				t, _ := d.Token()
				key = t.(string)
			}
			on := wanted && !end && key == path[0]
			var rest []string
			if on {
				rest = path[1:]
			}
			if wanted && !end && strings.EqualFold(key, path[0]) {
				found++
			}
			if v := wantJSON(d, rest, on); on {
				value = v
			}
		}
		_, _ = d.Token()
		if found != 1 {
			return ""
		}
	case string:
		if end && !strings.ContainsRune(token, utf8.RuneError) {
			return token
		}
	case json.Number:
		if end {
			return token.String()
		}
	case bool:
		if end {
			return strconv.FormatBool(token)
		}
	}
	return value
}

// wantForm is what net/http has for a field.
func wantForm(body []byte, field string) string {
	r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body))
	r.Header.Set("Content-Type", formType)
	_ = r.ParseForm()
	values := r.PostForm[field]
	for _, value := range values {
		if value != values[0] || !utf8.ValidString(value) || strings.ContainsRune(value, utf8.RuneError) {
			return ""
		}
	}
	return strings.Join(values[:min(1, len(values))], "")
}

// Whatever the body, a field is what the standard library finds there, or nothing.
func FuzzFields(f *testing.F) {
	files, err := filepath.Glob("testdata/webhooks/*.json")
	if err != nil || len(files) == 0 {
		f.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(content, "repository.full_name")
		f.Add(content, "data.object.customer")
		f.Add(content, "commits.0.added.0")
	}
	for _, seed := range []struct{ body, path string }{
		{`{"a":1,"a":2}`, "a"},
		{`{"a":{"b":[1,"\u00e9\ud83d\ude00",null]}}`, "a.b.1"},
		{`{"a.b":9007199254740993}`, `a\.b`},
		{`[[0],{"0":true}]`, "01.0"},
		{`{"\ud800":1,"a":"\udc00\ud800"}`, "a"},
		{"{\"a\xff\":\"\xff\"}", "a"},
		{`{"":{"":1}}`, "a."},
		{`{"a":1e999,"b":-0}`, "b"},
		{strings.Repeat("[", 100) + strings.Repeat("]", 100), "0.0.0"},
		{"a=1&a=1&b=%zz&c;d=1&%61=1", "a"},
		{"a[b]=%F0%9F%98%80+%ff", `a[b]`},
	} {
		f.Add([]byte(seed.body), seed.path)
	}
	f.Fuzz(func(t *testing.T, body []byte, path string) {
		asked := fields{make(map[string][]string), make(map[string]string)}
		want := make(map[string]string)
		if placeholder := "http.redis_lock.json." + path; asked.add(placeholder) == nil {
			want[placeholder] = ""
			if json.Valid(body) {
				d := json.NewDecoder(bytes.NewReader(body))
				d.UseNumber()
				want[placeholder] = wantJSON(d, asked.json[placeholder], true)
			}
		}
		if placeholder := "http.redis_lock.form." + path; asked.add(placeholder) == nil {
			want[placeholder] = wantForm(body, asked.form[placeholder])
		}
		before := bytes.Clone(body)
		for range 2 {
			repl := caddy.NewEmptyReplacer()
			asked.set(repl, http.Header{"Content-Type": {formType}}, body)
			for placeholder, want := range want {
				if got, _ := repl.Get(placeholder); got != want {
					t.Errorf("{%s} in %q: %q, want %q", placeholder, body, got, want)
				}
			}
		}
		if !bytes.Equal(body, before) {
			t.Error("the body has changed")
		}
	})
}

func BenchmarkFields(b *testing.B) {
	push := github(b)
	f, err := newFields([]string{"{http.redis_lock.json.repository.full_name}", "{http.redis_lock.json.ref}"})
	if err != nil {
		b.Fatal(err)
	}
	repl := caddy.NewReplacer()
	b.SetBytes(int64(len(push)))
	b.ReportAllocs()
	for b.Loop() {
		f.set(repl, nil, push)
	}
}
