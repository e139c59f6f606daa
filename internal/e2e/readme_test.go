package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// document returns a file of the documentation.
func document(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// blocks returns the documentation's code blocks in one language.
func blocks(t *testing.T, language string) (found []string) {
	t.Helper()
	for _, name := range []string{"README.md", "docs/redis.md", "docs/senders.md", "docs/recipes.md"} {
		for _, m := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(document(t, name), -1) {
			found = append(found, m[1])
		}
	}
	return found
}

// block returns the only block in a language that contains text.
func block(t *testing.T, language, text string) string {
	t.Helper()
	var found []string
	for _, b := range blocks(t, language) {
		if strings.Contains(b, text) {
			found = append(found, b)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d blocks of %s with %q, want one", len(found), language, text)
	}
	return found[0]
}

// inPlace puts the test's addresses into an example.
func inPlace(t *testing.T, example string, addresses ...string) string {
	t.Helper()
	for i := 0; i < len(addresses); i += 2 {
		if !strings.Contains(example, addresses[i]) {
			t.Fatalf("the example does not mention %s:\n%s", addresses[i], example)
		}
		example = strings.ReplaceAll(example, addresses[i], addresses[i+1])
	}
	return example
}

// startExample runs the example that contains text and serves :8080, before an app.
func startExample(t *testing.T, text, global, app string) *caddy {
	t.Helper()
	c := newCaddy(t)
	c.start(t, inPlace(t, block(t, "caddyfile", text), "localhost:9000", app,
		":8080 {\n", "{\nadmin "+c.admin+"\n"+global+"\n}\nhttp://"+c.addr+" {\n"))
	return c
}

// startSite runs the Caddyfile of the documentation that has a site, with the test's addresses in place of
// that and of its Redis. Which addresses take the place of the app's is up to the test.
func startSite(t *testing.T, site string, server *redistest.Server, addresses ...string) *caddy {
	t.Helper()
	c := newCaddy(t)
	installSenders(t, c)
	c.start(t, inPlace(t, block(t, "caddyfile", site), append(addresses, site, "http://"+c.addr, "redis.internal:6379", server.Addr,
		"{\n\tredis_lock {", "{\n\tadmin "+c.admin+"\n\tredis_lock {")...))
	return c
}

// Every Caddyfile in the documentation is one that `caddy validate` accepts.
func TestReadmeCaddyfilesAreValid(t *testing.T) {
	t.Parallel()
	examples := blocks(t, "caddyfile")
	if len(examples) < 15 {
		t.Fatalf("%d Caddyfiles", len(examples))
	}
	certs := redistest.NewCertificates(t)
	for _, example := range examples {
		c := newCaddy(t)
		c.env = []string{"REDIS_PASSWORD=secret"}
		installSenders(t, c)
		example = strings.ReplaceAll(example, "/etc/caddy/redis-ca.pem", certs.CA)
		code, output := exitCode(t, c.command("validate", "--adapter", "caddyfile", "--config", c.write(t, example)))
		if code != 0 || strings.Contains(output, "not formatted") {
			t.Errorf("%s\n%s", example, output)
		}
	}
}

// The examples of docs/redis.md serve requests, over what they are about.
func TestRedisExamples(t *testing.T) {
	t.Parallel()
	for name, inPlaceOf := range map[string]func(t *testing.T) (text string, places []string){
		"redis-ca.pem": func(t *testing.T) (string, []string) {
			certs := redistest.NewCertificates(t)
			server := redistest.StartTLS(t, certs, "--tls-auth-clients", "no")
			server.AddUser(t, "locker", "allkeys", "allchannels", "+@all")
			return "redis-ca.pem", []string{"redis.internal:6379", server.Addr, "/etc/caddy/redis-ca.pem", certs.CA}
		},
		"redis sentinel": func(t *testing.T) (string, []string) {
			s := redistest.StartSentinel(t)
			return "redis sentinel", replaceEach(":26379", s.Addrs)
		},
		"redis cluster": func(t *testing.T) (string, []string) {
			c := redistest.StartCluster(t)
			return "redis cluster", replaceEach(":6379", c.Addrs[:3])
		},
		"redis quorum": func(t *testing.T) (string, []string) {
			var addrs []string
			for _, server := range startQuorum(t).servers {
				addrs = append(addrs, server.Addr)
			}
			return "redis quorum", replaceEach(":6379", addrs)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text, places := inPlaceOf(t)
			up := startUpstream(t, nil)
			c := newCaddy(t)
			c.env = []string{"REDIS_PASSWORD=pass"}
			c.start(t, inPlace(t, block(t, "caddyfile", text), append(places, ":8080", "http://"+c.addr, "localhost:9000", up.addr(),
				"{\n\tredis_lock {", "{\n\tadmin "+c.admin+"\n\tredis_lock {")...))
			first := up.occupy(t, c.url)
			post(t, c.url, 423)
			up.letGo()
			wantStatus(t, <-first, 200)
		})
	}
}

// replaceEach puts addresses in place of 10.0.0.1, 10.0.0.2 and so on, at a port.
func replaceEach(port string, addrs []string) (places []string) {
	for i, addr := range addrs {
		places = append(places, fmt.Sprintf("10.0.0.%d%s", i+1, port), addr)
	}
	return places
}

func TestReadmeCommonCase(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startSite(t, "hooks.example.com", server, "localhost:9000", up.addr())
	first := up.occupy(t, c.url+"/hooks/shop", "X-Name", "shop")
	other := inFlight(t, c.url+"/hooks/blog", "X-Name", "blog")
	await(t, "another name to run", func() bool { return up.runs() == 2 })
	second := inFlight(t, c.url+"/hooks/shop", "X-Name", "shop")
	up.letGo()
	for _, a := range []<-chan answer{first, second, other} {
		wantStatus(t, <-a, 200)
	}
	if most := up.overlap(); most != 1 {
		t.Errorf("%d of one name at the same time", most)
	}
}

func TestReadmeProblemJSON(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startExample(t, "problem+json", onRedis(server), up.addr())
	first := up.occupy(t, c.url+"/")
	a := post(t, c.url+"/", 423)
	var problem struct {
		Status int
		Title  string
		Detail string
	}
	if err := json.Unmarshal([]byte(a.body), &problem); err != nil || problem.Status != 423 || problem.Title != "Locked" || problem.Detail == "" {
		t.Errorf("problem %+v (%v) in %q", problem, err, a.body)
	}
	if kind := a.Header.Get("Content-Type"); kind != "application/problem+json" {
		t.Errorf("Content-Type %q", kind)
	}
	wantRetryAfter(t, a)
	up.letGo()
	wantStatus(t, <-first, 200)
}

func TestReadmeNamesFromTheBody(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startExample(t, "CallSid", onRedis(server), up.addr()+namesAnswer)
	for _, webhook := range []struct{ contentType, body, name string }{
		{"application/json", `{"repository":{"full_name":"octo-org/octo-repo"}}`, "repository octo-org/octo-repo"},
		{"application/x-www-form-urlencoded", "CallSid=CA1", "call CA1"},
		{"text/plain", "hello", "/hook"},
	} {
		a := do(t.Context(), newClient(t), http.MethodPost, c.url+"/hook", webhook.body, "Content-Type", webhook.contentType)
		wantStatus(t, a, 200)
		if name := a.Header.Get("X-Name"); name != webhook.name {
			t.Errorf("%s: name %q, want %q", webhook.body, name, webhook.name)
		}
	}
}

// A stuck name: a bare DEL does not free it, the README's command does.
func TestReadmeFreesStuckName(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startCaddy(t, onRedis(server, "lease 24h"), "redis_lock foo\n"+up.proxy())
	up.occupy(t, c.url)
	c.kill() // with the lock

	survivor := startCaddy(t, onRedis(server), "redis_lock foo\n"+up.proxy())
	post(t, survivor.url, 423)
	server.Client.Del(t.Context(), "lock.foo")
	post(t, survivor.url, 423)

	host, port, _ := strings.Cut(server.Addr, ":")
	command := inPlace(t, block(t, "sh", "HDEL"), "redis-cli ", "redis-cli -h "+host+" -p "+port+" ")
	if output, err := exec.Command("sh", "-ec", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, output)
	}
	up.letGo()
	post(t, survivor.url, 200)
}

func TestReadmeNamesThisModule(t *testing.T) {
	t.Parallel()
	line := block(t, "sh", "xcaddy build")
	_, rest, _ := strings.Cut(document(t, "go.mod"), "module ")
	module, _, _ := strings.Cut(rest, "\n")
	if !strings.Contains(line, "--with "+module+"\n") {
		t.Errorf("%q does not build %s", line, module)
	}
}

// The option table has every option, and no other.
func TestReadmeOptionTable(t *testing.T) {
	t.Parallel()
	_, table, _ := strings.Cut(document(t, "README.md"), "## Options")
	table, _, _ = strings.Cut(table, "\n## ")
	var documented []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)").FindAllStringSubmatch(table, -1) {
		documented = append(documented, m[1])
	}
	c := newCaddy(t)
	_, output := exitCode(t, c.command("adapt", "--adapter", "caddyfile", "--config", c.write(t, ":80\nredis_lock {\nno_such_option\n}\n")))
	_, known, found := strings.Cut(output, "known are ")
	if !found {
		t.Fatal(output)
	}
	known, _, _ = strings.Cut(known, ", at ")
	for _, option := range strings.Split(known, ", ") {
		if !slices.Contains(documented, option) {
			t.Errorf("option %s is not in the table", option)
		}
	}
	if n := len(strings.Split(known, ", ")); len(documented) != n {
		t.Errorf("the table has %d options, %d are known: %v, %s", len(documented), n, documented, known)
	}
}

// rights returns what docs/redis.md says that a Redis user needs always, and for one more thing.
func rights(t *testing.T, also string) (rules []string) {
	t.Helper()
	for _, row := range []string{"always", also} {
		m := regexp.MustCompile("(?m)^\\| `?" + row + "`? \\| (.*) \\|(.*)\\|$").FindStringSubmatch(document(t, "docs/redis.md"))
		if m == nil {
			t.Fatalf("docs/redis.md does not say which rights are needed: %s", row)
		}
		for _, command := range strings.Fields(strings.ReplaceAll(m[1], `\|`, "|")) {
			rules = append(rules, "+"+strings.ToLower(command))
		}
		for _, key := range strings.Fields(m[2]) {
			rules = append(rules, "~"+strings.Trim(key, "`"))
		}
	}
	return rules
}

// A Redis user with the rights that the documentation lists, and no others, is enough: also for
// renewals, for waiting in line, and for finding out about foreign values.
func TestReadmeRedisUser(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		also  string
		site  string
		start func(t *testing.T) *deployment
	}{
		{"always", "supersede", deployments[0].start},
		{"protocol token", "", deployments[1].start},
		{"dedupe", "dedupe {header.X-Id}", deployments[0].start},
		{"quorum", "", startQuorum},
		{"cluster", "", func(t *testing.T) *deployment {
			cluster := redistest.StartCluster(t)
			return &deployment{redis: "redis cluster " + strings.Join(cluster.Addrs, " "), servers: cluster.Servers}
		}},
	} {
		t.Run(c.also, func(t *testing.T) {
			t.Parallel()
			d := c.start(t)
			for _, server := range d.servers {
				server.AddUser(t, "locker", rights(t, c.also)...)
			}
			d.redis += " {\nusername locker\npassword pass\n}"
			up := startUpstream(t, nil)
			proxy := startCaddy(t, d.global("lease 1s", "wait 10s"), "redis_lock {path} {\n"+c.site+"\n}\n"+up.proxy())
			first := up.occupy(t, proxy.url+"/hook", "X-Id", "1")
			end := d.freeAt(t, "/hook")
			second := inFlight(t, proxy.url+"/hook", "X-Id", "2")
			await(t, "renewals", func() bool { return d.freeAt(t, "/hook").Sub(end) > 2*time.Second })
			up.letGo()
			wantStatus(t, <-first, 200)
			wantStatus(t, <-second, 200)
			for _, server := range d.servers {
				_ = server.Client.RPush(t.Context(), "lock./foreign", "x").Err() // one of a cluster's has it
			}
			wantStatus(t, do(t.Context(), newClient(t), http.MethodPost, proxy.url+"/foreign", ""), 423)
			if log := proxy.log.String(); strings.Contains(log, "unavailable") {
				t.Error("the rights are not enough")
			}
		})
	}
}

// The tables of the README are those of the last run of the benchmark.
func TestReadmeShowsWhatWasMeasured(t *testing.T) {
	results := document(t, "bench/results.md")
	_, cost, _ := strings.Cut(document(t, "README.md"), "\n## What it costs\n")
	cost, _, _ = strings.Cut(cost, "\n## ")
	rows := regexp.MustCompile(`(?m)^\|.*\|$`).FindAllString(cost, -1)
	if len(rows) < 15 {
		t.Errorf("%d rows of tables", len(rows))
	}
	for _, row := range rows {
		if !strings.Contains(results, row+"\n") {
			t.Errorf("not in bench/results.md: %s", row)
		}
	}
	machine, _, _ := strings.Cut(results, ".\n")
	if !strings.Contains(cost, machine) {
		t.Errorf("the README does not say that it was measured on %s", machine)
	}
}
