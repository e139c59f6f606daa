package main

import (
	"bufio"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestReadHead(t *testing.T) {
	for _, test := range []struct {
		name, text, first string
		length            int
		id                uint64
		fails             bool
	}{
		{name: "answer", text: "HTTP/1.1 200 OK\r\ncontent-length: 12\r\nVia: 1.1 Caddy\r\n\r\n", first: "HTTP/1.1 200 OK", length: 12},
		{name: "request", text: "POST / HTTP/1.1\r\nX-Id: 0000000000000042\r\n\r\n", first: "POST / HTTP/1.1", id: 42},
		{name: "chunked", text: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", fails: true},
		{name: "cut off", text: "HTTP/1.1 200 OK\r\nContent-Length: 12\r\n", fails: true},
		{name: "no number", text: "HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", fails: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			first, length, id, err := readHead(bufio.NewReader(strings.NewReader(test.text)))
			if (err != nil) != test.fails {
				t.Fatalf("error %v", err)
			}
			if err == nil && (string(first) != test.first || length != test.length || id != test.id) {
				t.Errorf("%q, %d, %d", first, length, id)
			}
		})
	}
}

// TestVisit is the client and the app without a Caddy between them.
func TestVisit(t *testing.T) {
	app, err := startSlowApp(time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer app.close()
	for _, method := range []string{"POST", "GET"} {
		v, err := newVisitor(t.Context(), app.address(), method, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			err = errors.Join(err, v.visitAs(7))
		}
		if err := errors.Join(err, v.Close()); err != nil {
			t.Fatal(err)
		}
	}
	held := app.take(8)
	if len(held[7]) != 6 || lengthOf(held) != 6 {
		t.Fatalf("%d requests of visitor 7, %d of all, want 6", len(held[7]), lengthOf(held))
	}
	for _, h := range held[7] {
		if h.To-h.From < time.Millisecond {
			t.Errorf("held for %v only", h.To-h.From)
		}
	}
}
