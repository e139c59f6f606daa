package e2e

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"os"
	"testing"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// Webhooks are signed: their bytes and their headers reach the app as they came.
func TestWebhooksGoThroughUnchanged(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var got []byte
	var header http.Header
	up := startUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		var err error
		if got, err = io.ReadAll(r.Body); err != nil {
			t.Error(err)
		}
		header = r.Header
		if r.ContentLength != int64(len(got)) {
			t.Errorf("Content-Length %d, body of %d bytes", r.ContentLength, len(got))
		}
	})
	c := startCaddy(t, onRedis(server), `redis_lock {
		name {header.X-GitHub-Hook-ID} stripe
	}
	`+up.proxy())
	for _, webhook := range []struct {
		file, signature string
		header          []string
	}{
		{"github_push.json", "X-Hub-Signature-256", []string{
			"X-GitHub-Event", "push",
			"X-GitHub-Delivery", "72d3162e-cc78-11e3-81ab-4c9367dc0958",
			"X-GitHub-Hook-ID", "292430182",
		}},
		{"stripe_event.json", "Stripe-Signature", nil},
	} {
		body, err := os.ReadFile("../../testdata/webhooks/" + webhook.file)
		if err != nil {
			t.Fatal(err)
		}
		mac := hmac.New(sha256.New, []byte("secret"))
		mac.Write(body)
		signature := hex.EncodeToString(mac.Sum(nil))
		sent := append([]string{"Content-Type", "application/json", webhook.signature, signature}, webhook.header...)
		a := do(t.Context(), newClient(t), http.MethodPost, c.url+"/hooks", string(body), sent...)
		wantStatus(t, a, 200)
		if !bytes.Equal(got, body) {
			t.Errorf("%s: the body changed on its way", webhook.file)
		}
		for i := 0; i < len(sent); i += 2 {
			if header.Get(sent[i]) != sent[i+1] {
				t.Errorf("%s: header %s arrived as %q, want %q", webhook.file, sent[i], header.Get(sent[i]), sent[i+1])
			}
		}
	}
}
