package redislock

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
)

// wire notes what goes out to the client.
type wire struct {
	header http.Header
	log    strings.Builder
	fail   error // of all writes: the client is gone
	froms  int   // calls of ReadFrom

	onWrite func()
}

func (w *wire) Header() http.Header { return w.header }

func (w *wire) WriteHeader(status int) { fmt.Fprintf(&w.log, "%d ", status) }

func (w *wire) Write(p []byte) (int, error) {
	if w.onWrite != nil {
		w.onWrite()
	}
	if w.fail != nil {
		return 0, w.fail
	}
	return w.log.Write(p)
}

func (w *wire) ReadFrom(src io.Reader) (int64, error) {
	w.froms++
	return io.Copy(writerOnly{w}, src)
}

func (w *wire) FlushError() error {
	w.log.WriteString("|")
	return w.fail
}

func TestResponseKeepsTheEnd(t *testing.T) {
	length := func(n string) func(*response) {
		return func(w *response) { w.Header().Set("Content-Length", n) }
	}
	status := func(code int) func(*response) { return func(w *response) { w.WriteHeader(code) } }
	write := func(s string) func(*response) {
		return func(w *response) {
			if n, err := io.WriteString(w, s); n != len(s) || err != nil {
				t.Errorf("write %q: %d, %v", s, n, err)
			}
		}
	}
	copies := func(s string) func(*response) {
		return func(w *response) {
			if n, err := io.Copy(w, iotest.OneByteReader(strings.NewReader(s))); n != int64(len(s)) || err != nil {
				t.Errorf("copy %q: %d, %v", s, n, err)
			}
		}
	}
	flush := func(w *response) {
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Errorf("flush: %v", err)
		}
	}
	refused := func(want error) func(*response) {
		return func(w *response) {
			if _, err := w.Write([]byte("more")); !errors.Is(err, want) {
				t.Errorf("write beyond the end: %v, want %v", err, want)
			}
		}
	}
	type steps = []func(*response)
	for _, c := range []struct {
		name, method  string
		steps         steps
		before, after string // what is out before the release, and at last
	}{
		{"nothing", "POST", nil, "", ""},
		{"unknown length goes out as it comes", "POST", steps{write("some"), flush, write("more")}, "200 some|more", "200 some|more"},
		{"known length", "POST", steps{length("8"), write("some"), write("more")}, "200 somemor", "200 somemore"},
		{"known length, flushed", "POST", steps{length("4"), write("some"), flush}, "200 som|", "200 som|e"},
		{"known length, truncated", "POST", steps{length("8"), write("some")}, "200 some", "200 some"},
		{"known length, too long", "POST", steps{length("4"), write("some"), refused(http.ErrContentLength)}, "200 som", "200 some"},
		{"one byte", "POST", steps{length("1"), write("x"), flush}, "200 |", "200 |x"},
		{"empty writes", "POST", steps{length("1"), write(""), write("x"), write("")}, "200 ", "200 x"},
		{"length 0", "POST", steps{length("0"), status(201), flush}, "", "201 "},
		{"length 0, implied header", "POST", steps{length("0"), flush}, "", "200 "},
		{"204", "POST", steps{status(204), flush, refused(http.ErrBodyNotAllowed)}, "", "204 "},
		{"304", "POST", steps{status(304)}, "", "304 "},
		{"HEAD", "HEAD", steps{length("8"), status(200), write("ignored"), copies("ignored"), flush}, "", "200 "},
		{"early hints", "POST", steps{status(103), length("0"), status(103), status(200), status(103)}, "103 103 ", "103 103 200 "},
		{"switching protocols", "POST", steps{status(101)}, "101 ", "101 "},
		{"copied, unknown length", "POST", steps{copies("some"), copies("more")}, "200 somemore", "200 somemore"},
		{"copied, known length", "POST", steps{length("8"), copies("somemore")}, "200 somemor", "200 somemore"},
		{"copied in parts", "POST", steps{length("8"), write("so"), copies("mem"), copies("ore")}, "200 somemor", "200 somemore"},
		{"copied, one byte", "POST", steps{length("1"), copies("x")}, "200 ", "200 x"},
		{"second header", "POST", steps{status(201), status(202)}, "201 202 ", "201 202 "}, // net/http logs it
	} {
		t.Run(c.name, func(t *testing.T) {
			out := &wire{header: make(http.Header)}
			w := newResponse(out, httptest.NewRequest(c.method, "/", nil), true)
			for _, step := range c.steps {
				step(w)
			}
			if got := out.log.String(); got != c.before {
				t.Errorf("before the release %q is out, want %q", got, c.before)
			}
			w.finish()
			if got := out.log.String(); got != c.after {
				t.Errorf("at last %q is out, want %q", got, c.after)
			}
		})
	}
}

// A long answer of known length is left to net/http to copy, but for its end.
func TestResponseDelegatesCopying(t *testing.T) {
	content := bytes.Repeat([]byte("x"), 1<<20)
	for _, known := range []bool{true, false} {
		out := &wire{header: make(http.Header)}
		w := newResponse(out, httptest.NewRequest(http.MethodPost, "/", nil), true)
		if known {
			w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		}
		if n, err := w.ReadFrom(bytes.NewReader(content)); n != int64(len(content)) || err != nil {
			t.Errorf("copied %d bytes, %v", n, err)
		}
		if out.froms != 1 || len(w.kept) > 1 {
			t.Errorf("known length %v: %d calls of ReadFrom, %d bytes kept", known, out.froms, len(w.kept))
		}
		w.finish()
		if out.log.Len() != len("200 ")+len(content) {
			t.Errorf("known length %v: %d bytes are out", known, out.log.Len())
		}
	}
}

// The client is gone: handlers do not hear of it, unless they are to end with it.
func TestResponseHidesHangUp(t *testing.T) {
	broken := errors.New("broken pipe")
	for _, hide := range []bool{true, false} {
		for name, write := range map[string]func(w *response) (int64, error){
			"write": func(w *response) (int64, error) {
				n, err := w.Write([]byte("0123456789"))
				return int64(n), err
			},
			"copy":  func(w *response) (int64, error) { return io.Copy(w, strings.NewReader("0123456789")) },
			"flush": func(w *response) (int64, error) { return 10, w.FlushError() },
		} {
			out := &wire{header: make(http.Header), fail: broken}
			w := newResponse(out, httptest.NewRequest(http.MethodPost, "/", nil), hide)
			for range 3 {
				n, err := write(w)
				if hide && (n != 10 || err != nil) || !hide && err == nil {
					t.Errorf("%s, hidden %v: %d, %v", name, hide, n, err)
				}
			}
		}
	}
}

// An upstream that breaks off is an error, whether the client is there or not.
func TestResponseReportsBrokenSource(t *testing.T) {
	broken := errors.New("unexpected EOF")
	for _, gone := range []error{nil, errors.New("broken pipe")} {
		out := &wire{header: make(http.Header), fail: gone}
		w := newResponse(out, httptest.NewRequest(http.MethodPost, "/", nil), true)
		if _, err := w.ReadFrom(io.MultiReader(strings.NewReader("some"), iotest.ErrReader(broken))); !errors.Is(err, broken) {
			t.Errorf("client gone %v: error %v, want %v", gone, err, broken)
		}
	}
}

// A source that fails once, and then says that it is at its end, failed all the same.
func TestResponseRemembersBrokenSource(t *testing.T) {
	out := &wire{header: make(http.Header)}
	w := newResponse(out, httptest.NewRequest(http.MethodPost, "/", nil), true)
	broken := errors.New("unexpected EOF")
	failed := false
	src := readerFunc(func(p []byte) (int, error) {
		if failed {
			return 0, io.EOF
		}
		failed = true
		return 0, broken
	})
	if _, err := io.Copy(w, src); !errors.Is(err, broken) {
		t.Errorf("error %v, want %v", err, broken)
	}
	if _, err := w.Write([]byte("more")); err != nil || !strings.HasSuffix(out.log.String(), "more") {
		t.Errorf("%q is out, %v; the client is still there", out.log.String(), err)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// A write that fails because of the cut makes the answer incomplete.
func TestResponseCutDuringWrite(t *testing.T) {
	out := &wire{header: make(http.Header)}
	w := newResponse(out, httptest.NewRequest(http.MethodPost, "/", nil), true)
	_, _ = w.Write([]byte("some"))
	out.fail = errors.New("i/o timeout")
	out.onWrite = w.cut
	if _, err := w.Write([]byte("more")); err == nil {
		t.Error("the handler does not hear of it")
	}
	if w.complete() {
		t.Error("the answer counts as complete")
	}
}
