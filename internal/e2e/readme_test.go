package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// blocks returns the code blocks of README.md in one language.
func blocks(t *testing.T, language string) []string {
	t.Helper()
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, m := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(string(readme), -1) {
		found = append(found, m[1])
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
		t.Fatalf("README.md has %d blocks of %s with %q, want one", len(found), language, text)
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

// Every Caddyfile in the README is one that `caddy validate` accepts.
func TestReadmeCaddyfilesAreValid(t *testing.T) {
	t.Parallel()
	examples := blocks(t, "caddyfile")
	if len(examples) < 2 {
		t.Fatalf("README.md has %d Caddyfiles", len(examples))
	}
	for _, example := range examples {
		c := newCaddy(t)
		code, output := exitCode(t, c.command("validate", "--adapter", "caddyfile", "--config", c.write(t, example)))
		if code != 0 || strings.Contains(output, "not formatted") {
			t.Errorf("%s\n%s", example, output)
		}
	}
}

func TestReadmeCommonCase(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := newCaddy(t)
	c.start(t, inPlace(t, block(t, "caddyfile", "hooks.example.com"),
		"hooks.example.com", "http://"+c.addr, "redis.internal:6379", server.Addr, "localhost:9000", up.addr(),
		"{\n\tredis_lock {", "{\n\tadmin "+c.admin+"\n\tredis_lock {"))
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
	c := newCaddy(t)
	c.start(t, inPlace(t, block(t, "caddyfile", "problem+json"),
		":8080", "http://"+c.addr, "localhost:9000", up.addr(),
		"http://"+c.addr+" {\n", "{\nadmin "+c.admin+"\nredis_lock {\nredis "+server.Addr+"\n}\n}\nhttp://"+c.addr+" {\n"))
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
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(mod), "module ")
	module, _, _ := strings.Cut(rest, "\n")
	if !strings.Contains(line, "--with "+module+"\n") {
		t.Errorf("%q does not build %s", line, module)
	}
}

// The option table has every option, and no other.
func TestReadmeOptionTable(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(readme), "## Options")
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

// A Redis user with the rights that the README lists, and no others, is enough: also for renewals,
// and for finding out about foreign values.
func TestReadmeRedisUser(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	rights := regexp.MustCompile("(?s)needs the keys `(.*?)` and `(.*?)`, and the commands (.*?)\\.\n").FindStringSubmatch(string(readme))
	if rights == nil {
		t.Fatal("README.md does not say what a Redis user needs")
	}
	server := redistest.Start(t)
	user := []string{"~" + rights[1], "~" + rights[2]}
	for _, command := range regexp.MustCompile(`[A-Z]+`).FindAllString(rights[3], -1) {
		if command != "AND" {
			user = append(user, "+"+strings.ToLower(command))
		}
	}
	server.AddUser(t, "locker", user...)
	up := startUpstream(t, nil)
	c := startCaddy(t, "redis_lock {\nredis redis://locker:pass@"+server.Addr+"\nlease 1s\n}", "redis_lock {path}\n"+up.proxy())
	server.Client.RPush(t.Context(), "lock./foreign", "x")
	post(t, c.url+"/foreign", 423)
	first := up.occupy(t, c.url+"/hook")
	renewals := func() int { return server.Commands(t)["getset"] }
	await(t, "renewals", func() bool { return renewals() > 3 })
	up.letGo()
	wantStatus(t, <-first, 200)
	server.Client.Set(t.Context(), "lock./hook", 1, 0)
	post(t, c.url+"/hook", 200)
}

// The tables of the README are those of the last run of the benchmark.
func TestReadmeShowsWhatWasMeasured(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	results, err := os.ReadFile("../../bench/results.md")
	if err != nil {
		t.Fatal(err)
	}
	_, cost, _ := strings.Cut(string(readme), "\n## What it costs\n")
	cost, _, _ = strings.Cut(cost, "\n## ")
	rows := regexp.MustCompile(`(?m)^\|.*\|$`).FindAllString(cost, -1)
	if len(rows) < 15 {
		t.Errorf("%d rows of tables", len(rows))
	}
	for _, row := range rows {
		if !strings.Contains(string(results), row+"\n") {
			t.Errorf("not in bench/results.md: %s", row)
		}
	}
	machine, _, _ := strings.Cut(string(results), ".\n")
	if !strings.Contains(cost, machine) {
		t.Errorf("the README does not say that it was measured on %s", machine)
	}
}
