package e2e

import (
	"context"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// A sender is one that examples/senders has a snippet for.
type sender struct {
	signature string     // the field with it
	refused   int        // the status of a refusal
	stays     bool       // it never sends again, so who waits is served though it hung up
	locks     []delivery // what it sends
	entity    string     // what the lock of the first delivery is about, as the delivery has it
	id        string     // what is the first delivery's own
	others    []delivery // that are not the first one again, though they look much like it
}

// A delivery is a webhook, on its way.
type delivery struct {
	lock   string // the name that it must get
	body   string
	path   string   // behind the sender's name
	header []string // names and values
}

// with is a delivery that has another text in place of one.
func (d delivery) with(old, other string) delivery {
	d.body = strings.ReplaceAll(d.body, old, other)
	d.header = slices.Clone(d.header)
	for i := 1; i < len(d.header); i += 2 {
		d.header[i] = strings.ReplaceAll(d.header[i], old, other)
	}
	return d
}

// at is the same delivery to another path.
func (d delivery) at(path string) delivery {
	d.path = path
	return d
}

// sent is a delivery with a body out of testdata/webhooks.
func sent(t *testing.T, lock, file string, header ...string) delivery {
	t.Helper()
	body, err := os.ReadFile("../../testdata/webhooks/" + file)
	if err != nil {
		t.Fatal(err)
	}
	kind := "application/json"
	if strings.HasSuffix(file, ".form") {
		kind = "application/x-www-form-urlencoded"
	}
	return delivery{lock: lock, body: string(body), header: append([]string{"Content-Type", kind}, header...)}
}

func senders(t *testing.T) map[string]sender {
	t.Helper()
	gitHub := []string{"X-GitHub-Delivery", "a9c1", "X-GitHub-Hook-Installation-Target-Type", "repository",
		"X-GitHub-Hook-Installation-Target-ID", "17273051"}
	gitHubPush := sent(t, "github:octo-org/octo-repo", "github_push.json", gitHub...)
	gitLabPush := sent(t, "gitlab:4200", "gitlab_push.json", "Idempotency-Key", "a9c1")
	bitbucketPush := sent(t, "bitbucket:acme/shop", "bitbucket_push.json", "X-Request-UUID", "a9c1")
	charge := sent(t, "stripe:cus_test_dora", "stripe_charge.json")
	shop := []string{"X-Shopify-Shop-Domain", "acme.myshopify.com", "X-Shopify-Event-Id", "e1e1", "X-Shopify-Webhook-Id", "a9c1"}
	order := sent(t, "shopify:acme.myshopify.com:820982911946154508", "shopify_order.json", shop...)
	message := sent(t, "slack:T0ACME:C0ORDERS", "slack_message.json")
	call := sent(t, "twilio:CA00000000000000000000000000000001", "twilio_call.form", "I-Twilio-Idempotency-Token", "a9c1")
	interaction := sent(t, "discord:1200000000000000001", "discord_interaction.json")
	entitlement := sent(t, "discord:1400000000000000001", "discord_entitlement.json")
	return map[string]sender{
		"github": {
			signature: "X-Hub-Signature-256",
			refused:   423,
			stays:     true,
			locks: []delivery{
				gitHubPush,
				sent(t, "github:acme/shop", "github_pull_request.json", gitHub...),
				sent(t, "github:acme", "github_organization.json", gitHub...),
				sent(t, "github:integration:31337", "github_ping.json", "X-GitHub-Hook-Installation-Target-Type", "integration",
					"X-GitHub-Hook-Installation-Target-ID", "31337"),
				sent(t, "github:repository:17273051", "github_push.form", gitHub...),
			},
			entity: "octo-org/octo-repo",
			id:     "a9c1",
			others: []delivery{gitHubPush.at("/organization")}, // another hook, which gets the same event
		},
		"gitlab": {
			signature: "X-Gitlab-Token",
			refused:   503,
			stays:     true,
			locks: []delivery{
				gitLabPush,
				sent(t, "gitlab:4200", "gitlab_pipeline.json"),
				sent(t, "gitlab:4200", "gitlab_job.json"),
				sent(t, "gitlab:group:100", "gitlab_member.json"),
			},
			entity: "4200",
			id:     "a9c1",
		},
		"bitbucket": {
			signature: "X-Hub-Signature",
			refused:   503,
			stays:     true,
			locks: []delivery{
				bitbucketPush,
				sent(t, "bitbucket:acme/shop", "bitbucket_pullrequest.json"),
				{"bitbucket:{77aa}", "{}", "", []string{"X-Hook-UUID", "{77aa}"}},
			},
			entity: "acme/shop",
			id:     "a9c1",
			others: []delivery{bitbucketPush.at("/ci")},
		},
		"stripe": {
			signature: "Stripe-Signature",
			refused:   423,
			locks: []delivery{
				charge,
				sent(t, "stripe:cus_test_dora", "stripe_customer.json"),
				sent(t, "stripe:pi_test_guest", "stripe_payment_intent.json"),
				sent(t, "stripe:pi_test_guest", "stripe_dispute.json"),
				sent(t, "stripe", "stripe_balance.json"),
			},
			entity: "cus_test_dora",
			id:     "evt_test_charge",
			others: []delivery{charge.at("/connect")}, // another endpoint
		},
		"shopify": {
			signature: "X-Shopify-Hmac-Sha256",
			refused:   423,
			locks: []delivery{
				order,
				sent(t, order.lock, "shopify_refund.json", "X-Shopify-Shop-Domain", "acme.myshopify.com"),
				sent(t, "shopify:acme.myshopify.com:271878346596884015", "shopify_inventory_level.json", "X-Shopify-Shop-Domain", "acme.myshopify.com"),
				{order.lock, `{"order_edit":{"id":7,"order_id":820982911946154508}}`, "", []string{"X-Shopify-Shop-Domain", "acme.myshopify.com"}},
				{"shopify:acme.myshopify.com", "{}", "", []string{"X-Shopify-Shop-Domain", "acme.myshopify.com"}},
			},
			entity: "820982911946154508",
			id:     "a9c1",
		},
		"slack": {
			signature: "X-Slack-Signature",
			refused:   423,
			locks: []delivery{
				message,
				sent(t, message.lock, "slack_reaction.json"),
				sent(t, message.lock, "slack_channel_rename.json"),
				sent(t, message.lock, "slack_command.form"),
				message.with(`"channel"`, `"channel_id"`).with("Ev0MESSAGE", "Ev0FILE"),
				sent(t, "slack:T0ACME", "slack_team_join.json"),
				sent(t, "slack", "slack_url_verification.json"),
			},
			entity: "C0ORDERS",
			id:     "Ev0MESSAGE",
			others: []delivery{message.with("A0SHOP", "A0BOT")}, // another app
		},
		"twilio": {
			signature: "X-Twilio-Signature",
			refused:   423,
			stays:     true,
			locks: []delivery{
				call,
				sent(t, "twilio:+4915550001111:+4930555000", "twilio_message.form"),
				sent(t, "twilio:+4930555000:+4915550001111", "twilio_message_status.form"),
				sent(t, "twilio:SM00000000000000000000000000000001", "twilio_message.form").with("From=", "MessagingServiceSid="),
			},
			entity: "CA00000000000000000000000000000001",
			id:     "a9c1",
		},
		"discord": {
			signature: "X-Signature-Ed25519",
			refused:   423,
			locks: []delivery{
				entitlement,
				interaction,
				sent(t, "discord:1200000000000000001", "discord_authorized.json"),
				sent(t, "discord:1400000000000000001", "discord_direct.json"),
				sent(t, "discord:1000000000000000001", "discord_ping.json"),
			},
			entity: "1400000000000000001",
			id:     "1600000000000000001",
			others: []delivery{entitlement.with("_CREATE", "_UPDATE"), entitlement.with("064834", "064835")},
		},
	}
}

// installSenders puts the snippets where a Caddyfile of c imports them from.
func installSenders(t *testing.T, c *caddy) {
	t.Helper()
	if err := os.CopyFS(filepath.Join(c.dir, "senders"), os.DirFS("../../examples/senders")); err != nil {
		t.Fatal(err)
	}
}

// waiting gives the snippets another wait, for tests that are not about the time it takes.
func waiting(wait string) func(*testing.T, *caddy) {
	return func(t *testing.T, c *caddy) {
		t.Helper()
		for name := range senders(t) {
			path := filepath.Join(c.dir, "senders", name+".caddy")
			snippet, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			changed := regexp.MustCompile(`(?m)^\twait .*$`).ReplaceAll(snippet, []byte("\twait "+wait))
			if err := os.WriteFile(path, changed, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// startSenders runs a Caddy that takes the deliveries of each sender at a path with its name. The app
// gets the lock's name in X-Name, the client the outcome in X-Outcome.
func startSenders(t *testing.T, server *redistest.Server, up *upstream, prepare ...func(*testing.T, *caddy)) *caddy {
	t.Helper()
	c := newCaddy(t)
	installSenders(t, c)
	for _, p := range prepare {
		p(t, c)
	}
	var site strings.Builder
	site.WriteString("header >X-Outcome {http.redis_lock.outcome}\n")
	for name := range senders(t) {
		site.WriteString("handle /" + name + "* {\nimport senders/" + name + ".caddy\n" +
			up.proxy() + " {\nheader_up X-Name {http.redis_lock.name}\n}\n}\n")
	}
	c.start(t, c.config(onRedis(server), site.String()))
	return c
}

// to sends the delivery to a Caddy of startSenders.
func (d delivery) to(ctx context.Context, client *http.Client, c *caddy, name string, header ...string) answer {
	return do(ctx, client, http.MethodPost, c.url+"/"+name+d.path, d.body, slices.Concat(d.header, header)...)
}

// mirror is an app that answers with what it got: the body, and the header's fields behind Got-.
func mirror(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // what is cut off differs from what was sent
	for field, values := range r.Header {
		w.Header()["Got-"+field] = values
	}
	_, _ = w.Write(body)
}

// Each delivery gets the lock of what it is about, and reaches the app as it was sent.
func TestSendersNames(t *testing.T) {
	t.Parallel()
	c := startSenders(t, redistest.Start(t), startUpstream(t, mirror))
	for name, s := range senders(t) {
		about := delivery{lock: name, body: "{}"} // nothing that the snippet knows
		for _, d := range append(s.locks, about, about.with("{}", "")) {
			a := d.to(t.Context(), newClient(t), c, name, s.signature, "t=1,v1=c0ffee==")
			wantStatus(t, a, 200)
			if got := a.Header.Get("Got-X-Name"); got != d.lock {
				t.Errorf("%s: lock %q, want %q for %s", name, got, d.lock, d.body)
			}
			if a.body != d.body {
				t.Errorf("%s: the body changed on its way: %q, want %q", name, a.body, d.body)
			}
			if got := a.Header.Get("Got-" + http.CanonicalHeaderKey(s.signature)); got != "t=1,v1=c0ffee==" {
				t.Errorf("%s: the signature arrived as %q", name, got)
			}
		}
	}
}

// The largest bodies that GitHub and GitLab send still have their name.
func TestSendersLargestBodies(t *testing.T) {
	t.Parallel()
	c := startSenders(t, redistest.Start(t), startUpstream(t, mirror))
	for name, big := range map[string]struct {
		size int
		rest string
		lock string
	}{
		"github": {25_000_000, `","repository":{"full_name":"acme/big"}}`, "github:acme/big"},
		"gitlab": {25 << 20, `","project_id":4201}`, "gitlab:4201"},
	} {
		head := `{"ref":"`
		body := head + strings.Repeat("x", big.size-len(head)-len(big.rest)) + big.rest
		a := delivery{body: body}.to(t.Context(), newClient(t), c, name)
		wantStatus(t, a, 200)
		if got := a.Header.Get("Got-X-Name"); got != big.lock {
			t.Errorf("%s: lock %q, want %q", name, got, big.lock)
		}
		if a.body != body {
			t.Errorf("%s: the body changed on its way", name)
		}
	}
}

// send sends the delivery in the background. The channel gets its answer.
func (d delivery) send(t *testing.T, c *caddy, name string) <-chan answer {
	t.Helper()
	answers := make(chan answer, 1)
	client := newClient(t)
	go func() { answers <- d.to(t.Context(), client, c, name) }()
	return answers
}

// begin sends the delivery and waits until it runs in the app, where it stays until letGo.
func (d delivery) begin(t *testing.T, c *caddy, up *upstream, name string) <-chan answer {
	t.Helper()
	up.holdAll()
	answers := d.send(t, c, name)
	await(t, name+": the first to run", func() bool { return up.runs() == 1 })
	return answers
}

// Deliveries about two things run beside each other, those about one thing never do. The same one,
// sent again meanwhile, waits and is a duplicate.
func TestSendersRunOneAtATime(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startSenders(t, server, up, waiting("1m"))
	for name, s := range senders(t) {
		first := s.locks[0]
		before, _, _ := up.count()
		answers := []<-chan answer{first.begin(t, c, up, name)}
		answers = append(answers, first.with(s.entity, s.entity+"0").with(s.id, s.id+"b").send(t, c, name))
		await(t, name+": another thing's to run beside it", func() bool { return up.runs() == 2 })
		answers = append(answers, first.with(s.id, s.id+"c").send(t, c, name))
		await(t, name+": the same thing's to stand in line", func() bool { return inLine(t, server, first.lock) == 1 })
		again := first.send(t, c, name)
		await(t, name+": the first, sent again, to stand in line", func() bool { return inLine(t, server, first.lock) == 2 })
		up.letGo()
		for _, a := range append(answers, again) {
			wantStatus(t, <-a, 200)
		}
		if after, _, _ := up.count(); after-before != len(answers) {
			t.Errorf("%s: %d deliveries reached the app, want %d", name, after-before, len(answers))
		}
	}
	if most := up.overlap(); most != 1 {
		t.Errorf("%d of one lock at the same time", most)
	}
}

// What is refused gets the status that its sender makes the best of.
func TestSendersRefusals(t *testing.T) {
	t.Parallel()
	up := startUpstream(t, nil)
	c := startSenders(t, redistest.Start(t), up, waiting("0"))
	for name, s := range senders(t) {
		first := s.locks[0]
		served := first.begin(t, c, up, name)
		for status, d := range map[int]delivery{s.refused: first.with(s.id, s.id+"b"), 409: first} {
			a := d.to(t.Context(), newClient(t), c, name)
			wantStatus(t, a, status)
			wantRetryAfter(t, a)
		}
		up.letGo()
		wantStatus(t, <-served, 200)
	}
}

// A delivery whose sender hangs up while it waits is served if the sender would never send it again.
func TestSendersHangUp(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	up := startUpstream(t, nil)
	c := startSenders(t, server, up, waiting("1m"))
	for name, s := range senders(t) {
		first := s.locks[0]
		before, _, _ := up.count()
		served := first.begin(t, c, up, name)
		second := first.with(s.id, s.id+"b")
		ctx, hangUp := context.WithCancel(t.Context())
		client, gone := newClient(t), make(chan answer)
		go func() { gone <- second.to(ctx, client, c, name) }()
		await(t, name+": the second to stand in line", func() bool { return inLine(t, server, first.lock) == 1 })
		hangUp()
		<-gone
		want := 2
		if !s.stays {
			want = 1
			await(t, name+": the second to leave the line", func() bool { return inLine(t, server, first.lock) == 0 })
		}
		up.letGo()
		wantStatus(t, <-served, 200)
		await(t, name+": the line to be served", func() bool { _, ended, _ := up.count(); return ended == before+want })
		if begun, _, _ := up.count(); begun != before+want {
			t.Errorf("%s: %d deliveries reached the app, want %d", name, begun-before, want)
		}
	}
}

// A delivery that failed may come again. One that was handled never reaches the app again, and none is
// taken for another one.
func TestSendersHandleEachDeliveryOnce(t *testing.T) {
	t.Parallel()
	var failing atomic.Bool
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if failing.Load() {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	c := startSenders(t, redistest.Start(t), up)
	for name, s := range senders(t) {
		reaches := func(what string, d delivery, status int, outcome string, wanted int) {
			t.Helper()
			before, _, _ := up.count()
			a := d.to(t.Context(), newClient(t), c, name)
			wantStatus(t, a, status)
			if after, _, _ := up.count(); after-before != wanted {
				t.Errorf("%s: %s reached the app %d times, want %d", name, what, after-before, wanted)
			}
			if got := a.Header.Get("X-Outcome"); got != outcome {
				t.Errorf("%s: outcome %q of %s, want %s", name, got, what, outcome)
			}
		}
		first := s.locks[0]
		failing.Store(true)
		reaches("the first try", first, 500, "acquired", 1)
		failing.Store(false)
		reaches("the second try", first, 200, "acquired", 1)
		reaches("what was handled", first, 200, "duplicate", 0)
		for _, other := range append(s.others, first.with(s.id, s.id+"b")) {
			reaches("another delivery", other, 200, "acquired", 1)
		}
	}
}

// docs/senders.md is about the snippets that there are, and says of them what they say.
func TestSendersDocument(t *testing.T) {
	t.Parallel()
	text := document(t, "docs/senders.md")
	column := func(snippet []byte, option string) string {
		m := regexp.MustCompile(`(?m)^\t` + option + ` (.*)$`).FindSubmatch(snippet)
		if m == nil {
			t.Fatalf("no %s in\n%s", option, snippet)
		}
		return string(m[1])
	}
	seconds := func(text string) time.Duration {
		d, err := time.ParseDuration(strings.ReplaceAll(text, " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	documented := make(map[string]bool)
	for _, row := range regexp.MustCompile(`(?m)^\| \[(\w+)\]\(#(\w+)\) \| (\d+ s)[^|]* \|[^|]*\| ([^|]*) \| (\d+ s) \|`).FindAllStringSubmatch(text, -1) {
		title, name, patience, id, wait := row[1], row[2], seconds(row[3]), row[4], seconds(row[5])
		documented[name] = true
		snippet, err := os.ReadFile("../../examples/senders/" + name + ".caddy")
		if err != nil {
			t.Fatal(err)
		}
		if has := seconds(column(snippet, "wait")); has != wait || wait >= patience {
			t.Errorf("%s waits %v; documented are %v, and a patience of %v", name, has, wait, patience)
		}
		for _, part := range regexp.MustCompile("`([^`]*)`").FindAllStringSubmatch(id, -1) {
			if !strings.Contains(column(snippet, "dedupe"), "."+part[1]+"}") {
				t.Errorf("%s: the delivery id has no %s", name, part[1])
			}
		}
		if !strings.Contains(text, "\n## "+title+"\n") {
			t.Errorf("%s has no section", title)
		}
	}
	files, err := filepath.Glob("../../examples/senders/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name, _ := strings.CutSuffix(filepath.Base(file), ".caddy")
		if !documented[name] {
			t.Errorf("%s is not documented", file)
		}
		delete(documented, name)
	}
	if len(documented) > 0 {
		t.Errorf("documented, but not there: %v", slices.Collect(maps.Keys(documented)))
	}
}

// The example at the beginning of docs/senders.md: one import for each sender.
func TestSendersExample(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	gitHub, stripe := startUpstream(t, nil), startUpstream(t, nil)
	c := startSite(t, "in.example.com", server, "localhost:9000", gitHub.addr(), "localhost:9001", stripe.addr())
	for name, up := range map[string]*upstream{"github": gitHub, "stripe": stripe} {
		for range 2 {
			wantStatus(t, senders(t)[name].locks[0].to(t.Context(), newClient(t), c, name), 200)
		}
		if begun, _, _ := up.count(); begun != 1 {
			t.Errorf("%s: %d deliveries reached the app, want one", name, begun)
		}
	}
}
