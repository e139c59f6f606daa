package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/caddy-redis-lock/caddy-redis-lock/examples"
	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

func TestDemo(t *testing.T) {
	var out bytes.Buffer
	if err := (demo{listen: anyPort, out: &out}).run(t.Context()); err != nil {
		t.Fatalf("%v; output:\n%s", err, &out)
	}
	checkOutput(t, out.String())
	mustContain(t, out.String(), "\t\tmemory\n")
}

func TestDemoWithRedis(t *testing.T) {
	server := redistest.Start(t)
	if err := server.Client.ConfigSet(t.Context(), "requirepass", "geheim").Err(); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	d := demo{redis: "redis://:geheim@" + server.Addr, listen: anyPort, out: &out}
	if err := d.run(t.Context()); err != nil {
		t.Fatalf("%v; output:\n%s", err, &out)
	}
	checkOutput(t, out.String())
	mustContain(t, out.String(), "\t\tredis redis://:xxxxx@"+server.Addr+"\n")
	if strings.Contains(out.String(), "geheim") {
		t.Errorf("the password is in the output:\n%s", &out)
	}
}

// checkOutput is for what a demo prints, wherever the locks live.
func checkOutput(t *testing.T, out string) {
	t.Helper()
	mustContain(t, out,
		"redis_lock /hooks/* {path} {",
		"bind 127.0.0.1\n",
		"reverse_proxy 127.0.0.1:",
		"Most at the same time:  1 for shop, 1 for blog\n",
		"200 OK", "423 Locked",
	)
	for _, b := range plan {
		checkRows(t, out, b)
	}
	for line := range strings.Lines(strings.ReplaceAll(out, "\t", "        ")) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("%d columns are more than a terminal has: %s", n, line)
		}
	}
}

// checkRows makes sure that the deliveries of one name are all there, and that those which
// ran did so one after the other, in the order in which they were sent.
func checkRows(t *testing.T, out string, b batch) {
	t.Helper()
	rows := regexp.MustCompile(`(?m)^`+b.name+` #(\d) .*(200|423)  .*$`).FindAllStringSubmatch(out, -1)
	if len(rows) != b.count {
		t.Fatalf("%d rows for %s, want %d:\n%s", len(rows), b.name, b.count, out)
	}
	end := 0
	for i, row := range rows {
		if want := string(rune('1' + i)); row[1] != want {
			t.Errorf("row %q is where #%s should be", row[0], want)
		}
		cells := []rune(row[0])
		begun := slices.Index(cells, '█')
		if ran := begun >= 0; ran != (row[2] == "200") {
			t.Errorf("row %q: a bar is there if the status is 200, and only then", row[0])
		}
		if begun < 0 {
			continue
		}
		if begun < end {
			t.Errorf("row %q begins to run before the one sent before it has ended", row[0])
		}
		for end = begun; cells[end] == '█'; end++ {
		}
	}
}

func TestDemoKeepsServing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var url string
	out := &reactingBuffer{to: "curl", do: func(printed string) {
		defer cancel()
		url = regexp.MustCompile(`http://[^"]+`).FindString(printed)
		// As the reader would, but without the time to change terminals.
		if body, err := post(strings.Replace(url, "work=2.5s", "work=1ms", 1)); err != nil || !strings.HasPrefix(body, "ran from ") {
			t.Errorf("POST %s: %q, %v", url, body, err)
		}
	}}
	if err := (demo{listen: anyPort, keep: true, out: out}).run(ctx); err != nil {
		t.Fatal(err)
	}
	if url == "" {
		t.Fatalf("no curl command in the output:\n%s", out)
	}
	if _, err := post(url); err == nil {
		t.Error("something still serves after the demo")
	}
}

func TestDemoIsInterrupted(t *testing.T) {
	interrupt := errors.New("interrupt")
	ctx, cancel := context.WithCancelCause(t.Context())
	out := &reactingBuffer{to: "Sending", do: func(string) { cancel(interrupt) }}
	if err := (demo{listen: anyPort, keep: true, out: out}).run(ctx); !errors.Is(err, interrupt) {
		t.Errorf("error %v, want %v", err, interrupt)
	}
	if strings.Contains(out.String(), "Answers") {
		t.Errorf("a summary of an interrupted demo:\n%s", out)
	}
}

// A reactingBuffer calls do, once, with what is printed when that contains a text.
type reactingBuffer struct {
	bytes.Buffer
	to string
	do func(printed string)
}

func (b *reactingBuffer) Write(p []byte) (int, error) {
	if do := b.do; do != nil && strings.Contains(string(p), b.to) {
		b.do = nil
		do(string(p))
	}
	return b.Buffer.Write(p)
}

func post(url string) (string, error) {
	response, err := http.Post(url, "", nil)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

func TestDemoRefusesFlags(t *testing.T) {
	listener, err := net.Listen("tcp", anyPort)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	taken := listener.Addr().String()
	for _, test := range []struct{ name, flag, value, want string }{
		{"unreachable", "--redis", "redis://:geheim@127.0.0.1:1", "--redis: the Redis on 127.0.0.1:1 does not answer: dial tcp 127.0.0.1:1"},
		{"no URL", "--redis", "user:geheim@127.0.0.1:6379", "--redis: not a URL such as redis://"},
		{"unescaped password", "--redis", "redis://:geheim %@127.0.0.1:6379", "--redis: not a URL such as redis://"},
		{"unknown scheme", "--redis", "http://:geheim@127.0.0.1:6379", "--redis: redis: invalid URL scheme: http"},
		{"no port", "--listen", "localhost", `--listen "localhost": `},
		{"port in use", "--listen", taken, `--listen "` + taken + `": `},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out bytes.Buffer
			cmd := demoCommand()
			cmd.SetArgs([]string{test.flag, test.value})
			cmd.SetOut(&out)
			cmd.SetErr(&out)
			cmd.SilenceUsage = true // as Caddy does for all of its commands
			err := cmd.ExecuteContext(t.Context())
			if err == nil || !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("error %v, want %s", err, test.want)
			}
			if strings.Contains(out.String(), "geheim") {
				t.Errorf("the password is in the output:\n%s", &out)
			}
		})
	}
}

func TestListenAddress(t *testing.T) {
	for _, test := range []struct {
		listen    address
		url, site string
	}{
		{address{"127.0.0.1", "8080"}, "http://127.0.0.1:8080", ":8080 {\n\tbind 127.0.0.1\n\n"},
		{address{"::1", "8080"}, "http://[::1]:8080", ":8080 {\n\tbind ::1\n\n"},
		{address{"", "8080"}, "http://localhost:8080", ":8080 {\n"},
	} {
		if got := test.listen.url(); got != test.url {
			t.Errorf("%v: url %q, want %q", test.listen, got, test.url)
		}
		if got := test.listen.site(); got != test.site {
			t.Errorf("%v: site %q, want %q", test.listen, got, test.site)
		}
	}
}

func TestReplaceEach(t *testing.T) {
	got, err := replaceEach("one two", "one", "two", "two", "three")
	if want := "two three"; got != want || err != nil {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
	for _, text := range []string{"two", "one one two"} {
		if _, err := replaceEach(text, "one", "1", "two", "2"); err == nil || !strings.Contains(err.Error(), `"one"`) {
			t.Errorf("in %q: error %v; want one about one", text, err)
		}
	}
}

// history is a made-up demo: its deliveries, on a clock of its own.
func history() []delivery {
	at := func(ms int) time.Time { return time.Unix(0, 0).Add(time.Duration(ms) * time.Millisecond) }
	shop, blog := batch{"shop", 5}, batch{"blog", 1}
	return []delivery{
		{batch: shop, number: 1, sent: at(0), answered: at(605), status: 200, ran: span{at(2), at(603)}},
		{batch: shop, number: 2, sent: at(100), answered: at(1206), status: 200, ran: span{at(604), at(1204)}},
		{batch: shop, number: 3, sent: at(200), answered: at(202), status: 423},
		{batch: shop, number: 4, sent: at(300), answered: at(800), status: 423},
		{batch: shop, number: 5, sent: at(400), err: io.EOF},
		{batch: blog, number: 1, sent: at(500), answered: at(1102), status: 200, ran: span{at(501), at(1101)}},
	}
}

func TestTimeline(t *testing.T) {
	const want = `
         0.0s      0.5s      1.0s      1.5s
         |         |         |         |
shop #1  ████████████                              200  ran at once
shop #2    ░░░░░░░░░░████████████                  200  waited 0.5s, then ran
shop #3      ×                                     423  refused at once
shop #4        ░░░░░░░░░░×                         423  waited 0.5s, then refused
shop #5                                            no answer
blog #1            ████████████                    200  ran at once

         ░ waits in line   █ runs in the app   × is refused
`
	if got := "\n" + timeline(history()); got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
}

func TestTimelineOfASlowMachine(t *testing.T) {
	sent := time.Unix(0, 0)
	const want = `
         0.0s      2.0s      4.0s      6.0s
         |         |         |         |
shop #1  ░░░░░██████████                           200  waited 1.0s, then ran
shop #2  ░░░░░░░░░░░░░░░░░░░░×                     423  waited 4.0s, then refused

         ░ waits in line   █ runs in the app   × is refused
`
	got := "\n" + timeline([]delivery{
		{batch: batch{"shop", 2}, number: 1, sent: sent, answered: sent.Add(3 * time.Second), status: 200, ran: span{sent.Add(time.Second), sent.Add(3 * time.Second)}},
		{batch: batch{"shop", 2}, number: 2, sent: sent, answered: sent.Add(4 * time.Second), status: 423},
	})
	if got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
}

func TestSummary(t *testing.T) {
	const want = `
Most at the same time:  1 for shop, 2 for blog
Answers:                3 × 200 OK, 2 × 423 Locked, 1 × no answer
`
	got := "\n" + summary(history(), map[string]int{"/hooks/shop": 1, "/hooks/blog": 2})
	if got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
}

func TestVerify(t *testing.T) {
	alone := map[string]int{"/hooks/shop": 1}
	ran := span{time.Unix(0, 0), time.Unix(1, 0)}
	for _, test := range []struct {
		name     string
		delivery delivery
		most     map[string]int
		want     string // empty: no error
	}{
		{"ran", delivery{status: 200, ran: ran}, alone, ""},
		{"refused", delivery{status: 423}, alone, ""},
		{"two at a time", delivery{status: 200, ran: ran}, map[string]int{"/hooks/shop": 2}, "/hooks/shop: the lock did not hold: 2 ran at the same time"},
		{"other status", delivery{status: 503}, alone, "shop #1: unexpected status 503; want 200 or 423"},
		{"refused, but ran", delivery{status: 423, ran: ran}, alone, "shop #1: status 423, although it ran"},
		{"200, but did not run", delivery{status: 200}, alone, "shop #1: status 200, although it did not run"},
		{"no answer", delivery{err: io.EOF}, alone, "shop #1: no answer: EOF"},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := test.delivery
			d.batch, d.number = batch{"shop", 1}, 1
			got := ""
			if err := verify([]delivery{d}, test.most); err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("error %q, want %q", got, test.want)
			}
		})
	}
}

func TestQuickstart(t *testing.T) {
	text := []byte(examples.Quickstart)
	if formatted := caddyfile.Format(text); !bytes.Equal(formatted, text) {
		t.Errorf("quickstart.caddy is not as caddy fmt would have it:\n%s", formatted)
	}
	_, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt(text, nil)
	if err != nil || len(warnings) > 0 {
		t.Errorf("error %v, warnings %v", err, warnings)
	}
}

func mustContain(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%q is missing in:\n%s", part, text)
		}
	}
}
