package e2e

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/fcgi"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// A hook is one of adnanh/webhook's hooks.json.
type hook struct {
	Methods []string `json:"http-methods"`
	Output  bool     `json:"include-command-output-in-response"`
}

// A hookRunner is an app like adnanh/webhook: it answers when the command has ended, or at once.
type hookRunner struct {
	hook
	jobs *upstream // what the commands do
}

func (h *hookRunner) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !slices.Contains(h.Methods, r.Method) {
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	_, _ = io.Copy(io.Discard, r.Body)
	r = r.WithContext(context.WithoutCancel(r.Context())) // commands are not stopped
	if h.Output {
		h.jobs.ServeHTTP(w, r)
		return
	}
	go h.jobs.ServeHTTP(nil, r)
}

// Triggers of one hook run its command one at a time, also when their sender has hung up, and those of
// other hooks beside it.
func TestRecipeWebhook(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var hooks []hook
	if err := json.Unmarshal([]byte(block(t, "json", "execute-command")), &hooks); err != nil || len(hooks) != 1 {
		t.Fatal(hooks, err)
	}
	runner := &hookRunner{hook: hooks[0]}
	app := httptest.NewServer(runner)
	t.Cleanup(app.Close) // which waits for the jobs, that startUpstream lets go before
	jobs := startUpstream(t, func(http.ResponseWriter, *http.Request) {})
	runner.jobs = jobs
	c := startSite(t, "ci.example.com", server, "localhost:9000", app.Listener.Addr().String())
	jobs.holdAll()
	deploy := c.url + "/hooks/deploy"
	first := inFlight(t, deploy, "X-Name", "deploy", "X-Id", "first")
	await(t, "the first job to run", func() bool { return jobs.runs() == 1 })
	other := inFlight(t, c.url+"/hooks/backup", "X-Name", "backup", "X-Id", "other")
	await(t, "another hook's job to run beside it", func() bool { return jobs.runs() == 2 })

	impatient, hangUp := context.WithCancel(t.Context())
	client, gone := newClient(t), make(chan answer)
	go func() { gone <- do(impatient, client, http.MethodPost, deploy, "", "X-Name", "deploy", "X-Id", "gone") }()
	await(t, "a trigger to stand in line", func() bool { return inLine(t, server, "/hooks/deploy") == 1 })
	last := inFlight(t, deploy, "X-Name", "deploy", "X-Id", "last")
	await(t, "another one to stand in line", func() bool { return inLine(t, server, "/hooks/deploy") == 2 })
	hangUp()
	<-gone

	wantStatus(t, do(t.Context(), newClient(t), http.MethodGet, deploy, ""), 405)
	jobs.letGo()
	for _, a := range []<-chan answer{first, other, last} {
		wantStatus(t, <-a, 200)
	}
	if got := jobs.order(); !slices.Equal(got, []string{"first", "other", "gone", "last"}) {
		t.Errorf("jobs %v", got)
	}
	if most := jobs.overlap(); most != 1 {
		t.Errorf("%d jobs of one hook at the same time", most)
	}
}

// While one client writes a state, another one's write and lock get what Terraform tries again after.
func TestRecipeTerraform(t *testing.T) {
	t.Parallel()
	up := startUpstream(t, func(http.ResponseWriter, *http.Request) {})
	c := startSite(t, "state.example.com", redistest.Start(t), "localhost:9000", up.addr(), "wait 10s", "wait 100ms")
	state := c.url + "/state/prod"
	first := up.occupy(t, state)
	for _, request := range []struct{ method, query string }{
		{http.MethodPost, "?ID=0123"}, {http.MethodDelete, ""}, {"LOCK", ""}, {"UNLOCK", ""},
	} {
		a := do(t.Context(), newClient(t), request.method, state+request.query, "{}")
		wantStatus(t, a, 503)
		wantRetryAfter(t, a)
	}
	read := inFlightBy(t, http.MethodGet, state)
	await(t, "a GET to run beside the write", func() bool { return up.runs() == 2 })
	up.letGo()
	wantStatus(t, <-first, 200)
	wantStatus(t, <-read, 200)
}

// The backend's three addresses, which Terraform locks, unlocks and writes at, are one name.
func TestRecipeTerraformAddresses(t *testing.T) {
	t.Parallel()
	addresses := regexp.MustCompile(`address += "(.*)"`).FindAllStringSubmatch(block(t, "hcl", "backend"), -1)
	if len(addresses) != 3 || addresses[0][1] != addresses[1][1] || addresses[1][1] != addresses[2][1] {
		t.Errorf("addresses %v", addresses)
	}
}

// Two sites take turns, and an answer that streams is not over before its end. Who closes the page
// gives the GPU back.
func TestRecipeGPU(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	more := make(chan struct{})
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "token")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-more:
		case <-r.Context().Done():
		}
	})
	images := redistest.FreeAddr(t)
	c := startSite(t, "chat.example.com", server, "images.example.com", "http://"+images, "localhost:11434", up.addr(), "localhost:7860", up.addr())
	await(t, "the other site to be served", func() bool {
		conn, err := net.Dial("tcp", images)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})

	ctx, closePage := context.WithCancel(t.Context())
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, nil)
	if err != nil {
		t.Fatal(err)
	}
	streaming, err := newClient(t).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer streaming.Body.Close()
	if _, err := io.ReadFull(streaming.Body, make([]byte, len("token"))); err != nil {
		t.Fatal(err)
	}
	picture := inFlight(t, "http://"+images)
	await(t, "the other site's request to stand in line", func() bool { return inLine(t, server, "gpu0") == 1 })
	if n := up.runs(); n != 1 {
		t.Errorf("%d run at the same time", n)
	}
	closePage()
	await(t, "the first to end, and the other site's to run", func() bool { begun, ended, _ := up.count(); return begun == 2 && ended == 1 })
	close(more)
	wantStatus(t, <-picture, 200)
}

// A legacy app, over FastCGI, serves whatever changes something one at a time, and reads beside it.
func TestRecipeLegacy(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, func(http.ResponseWriter, *http.Request) {})
	app, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() { _ = fcgi.Serve(app, up) })
	t.Cleanup(func() {
		app.Close()
		served.Wait()
	})
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "index.php"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := startSite(t, "legacy.example.com", server, "/srv/legacy", root, "localhost:9000", app.Addr().String(), "wait 20s", "wait 1m")
	send := func(method, id string) <-chan answer {
		return inFlightBy(t, method, c.url+"/"+id, "X-Name", "write", "X-Id", id)
	}
	up.holdAll()
	writes := []<-chan answer{send(http.MethodPost, "0")}
	await(t, "the first write to run", func() bool { return up.runs() == 1 })
	for i, method := range []string{http.MethodPut, "MKCOL", "MOVE"} {
		writes = append(writes, send(method, strconv.Itoa(i+1)))
		await(t, method+" to stand in line", func() bool { return inLine(t, server, "legacy") == i+1 })
	}
	read := inFlightBy(t, http.MethodGet, c.url+"/read", "X-Id", "read")
	await(t, "a GET to run beside it", func() bool { return up.runs() == 2 })
	up.letGo()
	for _, a := range append(writes, read) {
		wantStatus(t, <-a, 200)
	}
	if got := up.order(); !slices.Equal(got, []string{"0", "read", "1", "2", "3"}) {
		t.Errorf("served %v", got)
	}
	if most := up.overlap(); most != 1 {
		t.Errorf("%d writes at the same time", most)
	}
}

// Of ten pushes in a row the first and the last are deployed, and the others are answered at once.
func TestRecipeDeploy(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startSite(t, "deploy.example.com", server, "localhost:9000", up.addr())
	shop := c.url + "/deploy/shop"
	first := up.occupy(t, shop, "X-Id", "1")
	waiting := inFlight(t, shop, "X-Id", "2")
	await(t, "the second to wait", func() bool { return inLine(t, server, "/deploy/shop") == 1 })
	for i := 3; i <= 10; i++ {
		newer := inFlight(t, shop, "X-Id", strconv.Itoa(i))
		wantStatus(t, <-waiting, 202)
		waiting = newer
	}
	await(t, "the last to wait", func() bool { return inLine(t, server, "/deploy/shop") == 1 })
	up.letGo()
	wantStatus(t, <-first, 200)
	wantStatus(t, <-waiting, 200)
	if got := up.order(); !slices.Equal(got, []string{"1", "10"}) {
		t.Errorf("deployed %v", got)
	}
}
