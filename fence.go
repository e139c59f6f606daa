package redislock

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// A fenceHeader is the field, in its canonical form, in which the app gets the fencing token;
// empty: none.
type fenceHeader string

// strip removes what the client sent under that name, as the app relies on it being ours. That
// includes a trailer, and the client's wish that the field be dropped on the way. Within a
// redis_lock with the same field that has been done, and the field is that one's.
func (f fenceHeader) strip(r *http.Request) {
	if f == "" || isFenced(r, f) {
		return
	}
	delete(r.Header, string(f))
	if r.Trailer != nil {
		delete(r.Trailer, string(f))
		r.Body = trailerGuard{r.Body, r.Trailer, f}
	}
	if slices.ContainsFunc(r.Header["Connection"], f.isMentionedIn) {
		f.strikeFromConnection(r.Header)
	}
}

// A trailerGuard removes the field from the trailers when they have arrived: with the end of
// the body, announced or not.
type trailerGuard struct {
	io.ReadCloser
	trailer http.Header
	fence   fenceHeader
}

func (g trailerGuard) Read(p []byte) (int, error) {
	n, err := g.ReadCloser.Read(p)
	if err != nil {
		delete(g.trailer, string(g.fence))
	}
	return n, err
}

func (f fenceHeader) isMentionedIn(value string) bool {
	return httpguts.HeaderValuesContainsToken([]string{value}, string(f))
}

func (f fenceHeader) strikeFromConnection(header http.Header) {
	var rest []string
	for _, value := range header["Connection"] {
		for option := range strings.SplitSeq(value, ",") {
			if option = strings.TrimSpace(option); !strings.EqualFold(option, string(f)) {
				rest = append(rest, option)
			}
		}
	}
	header.Set("Connection", strings.Join(rest, ", "))
}

func (f fenceHeader) set(r *http.Request, fence int64) {
	if f != "" && fence != 0 {
		r.Header[string(f)] = []string{strconv.FormatInt(fence, 10)}
	}
}

// checkFenceHeader refuses fields that do not reach the app as they were set.
func checkFenceHeader(field string) error {
	if !httpguts.ValidHeaderFieldName(field) {
		return fmt.Errorf("%q is not a header field", field)
	}
	switch canonical := http.CanonicalHeaderKey(field); canonical {
	case "Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Host", "Content-Length":
		return fmt.Errorf("%s has a meaning of its own on the way to the app; take a name like X-Fence", canonical)
	}
	return nil
}
