package redislock

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// firstBuffer is as much memory as a body gets before it has come.
const firstBuffer = 16 << 10

// bufferBody reads the request's body, up to h.Buffer bytes, so that a slow sender holds
// nothing while it types. What is longer streams on, with the lock held.
//
// Length, unknown length and trailers stay as they are. The buffer is never reused: net/http
// may still read a body when the request it was for has been answered.
func (h *Handler) bufferBody(r *http.Request) error {
	limit := *h.Buffer
	if limit == 0 || r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0 ||
		r.Method == http.MethodConnect || caddyhttp.IsIncremental(r.Header) {
		return nil
	}
	switch r.Body.(type) {
	case *bufferedBody, partlyBufferedBody, *streamedBody:
		return nil // done, by readFields or by a redis_lock around this one
	}
	// Content-Length is a claim: beyond firstBuffer the buffer grows with what arrives.
	var buffer bytes.Buffer
	buffer.Grow(int(max(0, min(r.ContentLength, limit, firstBuffer))) + bytes.MinRead)
	_, err := buffer.ReadFrom(io.LimitReader(r.Body, limit+1))
	switch {
	case err != nil:
		return bodyError(r, err)
	case int64(buffer.Len()) <= limit:
		r.Body = newBufferedBody(buffer.Bytes())
	default:
		r.Body = partlyBufferedBody{io.MultiReader(&buffer, r.Body), r.Body}
	}
	return nil
}

// readFields sets the placeholders that names ask for in the body. A body that is not here as a whole
// has no fields.
func (h *Handler) readFields(r *http.Request, repl *caddy.Replacer) error {
	if h.fields.none() {
		return nil
	}
	if err := h.bufferBody(r); err != nil {
		return err
	}
	var content []byte
	if body, ok := r.Body.(*bufferedBody); ok {
		content = body.content
	}
	h.fields.set(repl, r.Header, content)
	return nil
}

// hasWholeBody is true if nothing of the request's body is still to come.
func hasWholeBody(r *http.Request) bool {
	_, buffered := r.Body.(*bufferedBody)
	return buffered || r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0
}

// bodyError is for the client: its body was not read, so no lock was taken.
func bodyError(r *http.Request, err error) error {
	if herr, ok := errors.AsType[caddyhttp.HandlerError](err); ok {
		return herr // of request_body max_size
	}
	if r.Context().Err() != nil {
		return caddyhttp.Error(statusClientClosed, err)
	}
	return caddyhttp.Error(http.StatusBadRequest, err)
}

// bufferedBody is a body that was read to its end.
type bufferedBody struct {
	*bytes.Reader
	content []byte
}

func newBufferedBody(content []byte) *bufferedBody {
	return &bufferedBody{bytes.NewReader(content), content}
}

func (*bufferedBody) Close() error { return nil }

// A streamedBody reads the body of the client's request, whatever that is by then, and notes
// its end.
type streamedBody struct {
	client *http.Request
	ended  atomic.Bool
}

func (b *streamedBody) Read(p []byte) (int, error) {
	n, err := b.client.Body.Read(p)
	if err != nil {
		b.ended.Store(true)
	}
	return n, err
}

func (b *streamedBody) Close() error { return b.client.Body.Close() }

type partlyBufferedBody struct {
	io.Reader
	io.Closer
}
