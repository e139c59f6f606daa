package redislock

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// response is the answer of the handlers that run with the lock, on its way to the client.
//
// It keeps the answer's end back until the lock is released, or the client could meet its own
// lock with its next request: the last byte of a body of known length, and the header of an
// answer without a body. (net/http itself ends all other answers only after the handlers have
// returned.) Everything else goes out as it comes.
//
// It hides from the handlers that the client has hung up, if they are to finish all the same:
// what they write is discarded, so that they read the app's answer to its end.
//
// It can be cut, when the lock is lost: nothing goes out after that.
type response struct {
	*caddyhttp.ResponseWriterWrapper
	isHead     bool
	hideHangUp bool

	before http.Header // what was set before the handlers ran

	mu         sync.Mutex
	writing    int  // writes under way
	hasHeader  bool // the handlers have written one
	isOut      bool // it has gone to the client
	hungUp     bool // the client has, and the handlers do not know
	isCut      bool
	lacks      bool        // something was not written because of the cut
	headerKept http.Header // as it was when it was written; nil: not kept
	status     int
	length     int64 // of the body; -1: not known
	written    int64 // of the body, with the byte that is kept
	kept       []byte
}

func newResponse(w http.ResponseWriter, r *http.Request, hideHangUp bool) *response {
	return &response{
		ResponseWriterWrapper: &caddyhttp.ResponseWriterWrapper{ResponseWriter: w},
		isHead:                r.Method == http.MethodHead,
		hideHangUp:            hideHangUp,
		before:                w.Header().Clone(),
	}
}

// WriteHeader sends the header on, or keeps it until finish.
func (w *response) WriteHeader(status int) {
	if status < 200 && status != http.StatusSwitchingProtocols {
		if !w.dead() { // informational: more will follow
			w.ResponseWriter.WriteHeader(status)
		}
		return
	}
	if w.beginHeader(status) {
		w.ResponseWriter.WriteHeader(status)
	}
}

// beginHeader is true if the header goes out now.
func (w *response) beginHeader(status int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hasHeader {
		return w.isOut // net/http logs who wrote a second one
	}
	if w.isCut {
		w.lacks = true
		return false
	}
	w.hasHeader = true
	w.status = status
	w.length = w.bodyLength(status)
	if w.length == 0 {
		w.headerKept = w.Header().Clone()
	}
	w.isOut = w.headerKept == nil
	return w.isOut
}

func (w *response) bodyLength(status int) int64 {
	if w.isHead || status == http.StatusNoContent || status == http.StatusNotModified {
		return 0
	}
	if length, err := strconv.ParseInt(w.Header().Get("Content-Length"), 10, 64); err == nil && length >= 0 {
		return length
	}
	return -1
}

// Write sends p on, but for the last byte of the body.
func (w *response) Write(p []byte) (int, error) {
	w.implyHeader()
	out, err := w.beginWrite(p)
	if err != nil {
		return 0, err
	}
	if len(out) > 0 {
		n, err := w.ResponseWriter.Write(out)
		if w.endWrite(); err != nil && !w.hangUp() {
			return n, err
		}
	}
	return len(p), nil
}

// implyHeader writes the header that net/http implies, if there is none yet.
func (w *response) implyHeader() {
	w.mu.Lock()
	hasHeader := w.hasHeader
	w.mu.Unlock()
	if !hasHeader {
		w.WriteHeader(http.StatusOK)
	}
}

// beginWrite returns what of p goes out now.
func (w *response) beginWrite(p []byte) ([]byte, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.isCut:
		w.lacks = true
		return nil, errCut
	case w.headerKept != nil && w.isHead, len(p) == 0:
		return nil, nil
	case w.headerKept != nil:
		return nil, http.ErrBodyNotAllowed
	case w.length >= 0 && w.written+int64(len(p)) > w.length:
		return nil, http.ErrContentLength
	}
	w.written += int64(len(p))
	if w.written == w.length {
		last := len(p) - 1
		w.kept = []byte{p[last]}
		p = p[:last]
	}
	if w.hungUp {
		return nil, nil
	}
	if len(p) > 0 {
		w.writing++
	}
	return p, nil
}

func (w *response) endWrite() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.writing--
}

// ReadFrom leaves the copying to net/http, but for the last byte.
func (w *response) ReadFrom(src io.Reader) (int64, error) {
	w.implyHeader()
	w.mu.Lock()
	left := w.length - w.written - 1 // negative: the length is not known
	direct := !w.isCut && !w.hungUp && w.headerKept == nil && left != 0
	if direct {
		w.writing++
	}
	w.mu.Unlock()
	if !direct {
		return io.Copy(writerOnly{w}, src)
	}
	from := &source{Reader: src}
	part := io.Reader(from)
	if left > 0 {
		part = io.LimitReader(from, left)
	}
	n, err := w.ResponseWriterWrapper.ReadFrom(part)
	w.mu.Lock()
	w.written += n
	w.writing--
	w.mu.Unlock()
	if err != nil && (from.err != nil || !w.hangUp()) {
		return n, err
	}
	m, err := io.Copy(writerOnly{w}, src) // the last byte, or all that a client who is gone does not get
	return n + m, err
}

// A source remembers that reading failed: it is not the client who is gone then.
type source struct {
	io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// writerOnly hides ReadFrom from io.Copy.
type writerOnly struct{ io.Writer }

// Flush is for handlers that know http.Flusher only.
func (w *response) Flush() { _ = w.FlushError() }

// FlushError sends what was written, but for what is kept.
func (w *response) FlushError() error {
	w.implyHeader()
	if w.dead() {
		return nil
	}
	w.mu.Lock()
	w.writing++
	w.mu.Unlock()
	err := http.NewResponseController(w.ResponseWriter).Flush()
	w.endWrite()
	if err != nil && !errors.Is(err, http.ErrNotSupported) && w.hangUp() {
		return nil
	}
	return err
}

// dead is true while nothing may go out.
func (w *response) dead() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.isCut || w.hungUp || w.headerKept != nil
}

// hangUp is called when the client is gone. It is false if the handlers are to hear of it.
func (w *response) hangUp() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.isCut { // it failed because of that
		w.lacks = true
		return false
	}
	w.hungUp = w.hideHangUp
	return w.hungUp
}

var errCut = errors.New("the request's time with the lock is over")

// patience is for the last bytes of an answer that is complete but for them.
const patience = 5 * time.Second

// cut lets nothing out any more. A handler that is stuck in writing to a client that does not
// read comes back.
func (w *response) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isCut = true
	if w.writing == 0 {
		return
	}
	deadline := time.Now()
	if w.written == w.length {
		deadline = deadline.Add(patience)
	}
	_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(deadline)
}

// takeBack removes the header fields of an answer that does not go out.
func (w *response) takeBack() {
	clear(w.Header())
	maps.Copy(w.Header(), w.before)
}

// complete is true for an answer whose handlers, which have returned, wrote all of it.
func (w *response) complete() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.hasHeader && !w.lacks && (w.length < 0 || w.written == w.length || w.headerKept != nil)
}

// answered returns the status of an answer whose handlers, which have returned, wrote all of it; 0 if they
// wrote none, and -1 if a part is missing.
func (w *response) answered() int {
	complete := w.complete()
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case complete:
		return w.status
	case !w.hasHeader && !w.lacks:
		return 0
	}
	return -1
}

// out is true if the client has seen a part of the answer.
func (w *response) out() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.isOut
}

// finish sends what was kept.
func (w *response) finish() {
	if w.headerKept != nil {
		later := maps.Clone(w.Header()) // trailers among them
		clear(w.Header())
		maps.Copy(w.Header(), w.headerKept)
		w.ResponseWriter.WriteHeader(w.status)
		maps.Copy(w.Header(), later)
	}
	if len(w.kept) > 0 && !w.hungUp {
		_, _ = w.ResponseWriter.Write(w.kept) // a client that is gone does not matter any more
	}
}

// Interface guards
var (
	_ http.Flusher  = (*response)(nil)
	_ io.ReaderFrom = (*response)(nil)
)
