package redislock_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	redislock "github.com/caddy-redis-lock/caddy-redis-lock"
)

var update = flag.Bool("update", false, "write the results of TestAdapt into its files")

// adapt turns a Caddyfile into JSON as `caddy adapt --pretty` does.
func adapt(text string) (string, error) {
	result, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return "", err
	}
	if len(warnings) > 0 {
		return "", fmt.Errorf("warnings: %v", warnings)
	}
	var pretty bytes.Buffer
	err = json.Indent(&pretty, result, "", "\t")
	return pretty.String(), err
}

// validate does what `caddy validate` does: provisions the configuration, but does not start it.
func validate(config string) error {
	var c *caddy.Config
	if err := caddy.StrictUnmarshalJSON([]byte(config), &c); err != nil {
		return err
	}
	return caddy.Validate(c)
}

// TestAdapt: each file is a Caddyfile, a line of dashes, and the JSON it becomes.
func TestAdapt(t *testing.T) {
	files, err := filepath.Glob("testdata/adapt/*.caddyfiletest")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	t.Setenv("REDIS_PASSWORD", "secret")
	t.Setenv("SENTINEL_PASSWORD", "secret")
	const dashes = "----------\n"
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			source, want, found := strings.Cut(string(content), dashes)
			if !found && !*update {
				t.Fatalf("no line of dashes")
			}
			got, err := adapt(source)
			if err != nil {
				t.Fatal(err)
			}
			if *update {
				if err := os.WriteFile(file, []byte(source+dashes+got+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != strings.TrimSpace(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if err := validate(got); err != nil {
				t.Errorf("the JSON is not valid: %v", err)
			}
			if formatted := string(caddyfile.Format([]byte(source))); formatted != source {
				t.Errorf("not as caddy fmt writes it:\n%s", formatted)
			}
		})
	}
}

// Wrong configurations fail while adapting, with the file, the line and the option.
func TestWrongCaddyfile(t *testing.T) {
	for _, c := range []struct{ name, options, want string }{
		{"unknown option", "lifetime 30s", "lifetime: unknown option"},
		{"dedupe without an id", "dedupe", "dedupe: takes an id and, if need be, a window, got 0 values"},
		{"dedupe with more", "dedupe {header.A} 1h 2h", "dedupe: takes an id and, if need be, a window, got 3 values"},
		{"dedupe with an empty id", `dedupe ""`, "dedupe: has no id"},
		{"dedupe with the same for all", "dedupe X-GitHub-Delivery", `dedupe: "X-GitHub-Delivery" is the same for all deliveries`},
		{"dedupe with the same for all of a Caddy", "dedupe {env.HOSTNAME}-{file./etc/hostname}{system.hostname}", "is the same for all deliveries"},
		{"dedupe with a window without unit", "dedupe {header.A} 24", `dedupe: "24" is not a duration with a unit`},
		{"dedupe with a window of nothing", "dedupe {header.A} 0s", "dedupe: 0s is not more than 0"},
		{"dedupe with a wrong field", "dedupe {http.redis_lock.json.}", "dedupe: {http.redis_lock.json.} has an empty key"},
		{"supersede with no status", "wait 1s\nsupersede done", `supersede: "done" is not a whole number`},
		{"supersede with an early status", "wait 1s\nsupersede 103", "supersede: 103 is not a status from 200 to 599"},
		{"supersede with status 0", "wait 1s\nsupersede 0", "supersede: 0 is not a status from 200 to 599"},
		{"supersede with more", "wait 1s\nsupersede 202 204", "supersede: takes one status at most, got 2 values"},
		{"lease without unit", "lease 30", `lease: "30" is not a duration with a unit`},
		{"lease zero", "lease 0s", "lease: 0s is not a whole number of seconds"},
		{"lease of half a second", "lease 500ms", "lease: 500ms is not"},
		{"lease not whole", "lease 1500ms", "lease: 1.5s is not"},
		{"lease too long", "lease 2d", "lease: 48h0m0s is not"},
		{"lease missing", "lease", "lease: takes one value, got 0"},
		{"lease and more", "lease 1s 2s", "lease: takes one value, got 2"},
		{"wait negative", "wait -1s", "wait: -1s is negative"},
		{"wait without unit", "wait 5", `wait: "5" is not a duration`},
		{"queue negative", "queue -1", "queue: -1 is negative"},
		{"queue fraction", "queue 1.5", `queue: "1.5" is not a whole number`},
		{"max_hold zero", "max_hold 0s", "max_hold: 0s is not more than 0"},
		{"max_hold without unit", "max_hold 10", `max_hold: "10" is not a duration`},
		{"buffer negative", "buffer -1", `buffer: "-1" is not a size`},
		{"buffer text", "buffer large", `buffer: "large" is not a size`},
		{"on_disconnect", "on_disconnect ignore", `on_disconnect: "ignore" is neither finish nor stay nor cancel`},
		{"on_lost", "on_lost finish", `on_lost: "finish" is neither cancel nor continue`},
		{"fence_header hop-by-hop", "fence_header te", "fence_header: Te has a meaning of its own"},
		{"fence_header Host", "fence_header host", "fence_header: Host has a meaning of its own"},
		{"fence_header with a space", `fence_header "X Fence"`, `fence_header: "X Fence" is not a header field`},
		{"fence_header empty", `fence_header ""`, `fence_header: "" is not a header field`},
		{"status too low", "status 99", "status: 99 is not an error status"},
		{"status success", "status 200", "status: 200 is not an error status"},
		{"status too high", "status 600", "status: 600 is not an error status"},
		{"status text", "status locked", `status: "locked" is not a whole number`},
		{"method in lower case", "methods post", `methods: "post" is not a method`},
		{"method twice", "methods PUT PUT", "methods: PUT is given twice"},
		{"unsafe among methods", "methods PUT unsafe", "methods: unsafe stands for"},
		{"no methods", "methods", "methods: takes at least one value"},
		{"empty name", `name ""`, "name: empty"},
		{"empty path", "name {http.redis_lock.json.} a", "name: {http.redis_lock.json.} has an empty key; write keys"},
		{"no path", "name {http.redis_lock.json}", "name: {http.redis_lock.json} has an empty key"},
		{"empty key", "name {http.redis_lock.json.a..b}", "name: {http.redis_lock.json.a..b} has an empty key"},
		{"empty last key", "name x-{http.redis_lock.json.a.}", "name: {http.redis_lock.json.a.} has an empty key"},
		{"empty field", "name {http.redis_lock.form.}", "name: {http.redis_lock.form.} has no field; name the one to use"},
		{"path with a backslash at its end", `name {http.redis_lock.json.a\}`, `name: {http.redis_lock.json.a\} ends with a backslash`},
		{"path that is not UTF-8", "name {http.redis_lock.json.\xff}", "is not valid UTF-8"},
		{"braces without end", "name " + strings.Repeat("{", 200), "name: too many unclosed placeholders"},
		{"no name", "name", "name: takes at least one value"},
		{"on_no_name", "on_no_name ignore", `on_no_name: "ignore" is neither reject nor pass`},
		{"on_redis_error", "on_redis_error fail", `on_redis_error: "fail" is neither reject nor pass`},
		{"prefix with braces", "prefix {$NONE:x}{y}", "prefix: "},
		{"empty prefix", `prefix ""`, "prefix: empty"},
		{"memory and redis", "memory\nredis 127.0.0.1:6379", "redis: locks live in memory or in redis"},
		{"redis and memory", "redis 127.0.0.1:6379\nmemory", "memory: locks live in memory or in redis"},
		{"memory with a value", "memory 1GB", `memory: takes no value, got "1GB"`},
		{"lease twice", "lease 1s\nlease 2s", "lease: given twice"},
		{"redis twice", "redis 127.0.0.1:1\nredis 127.0.0.1:2", "redis: given twice"},
		{"two addresses", "redis 127.0.0.1:1 127.0.0.1:2", "redis: 2 addresses"},
		{"no address", "redis", "redis: takes at least one address"},
		{"address without port", "redis localhost", `redis: address "localhost" is not valid`},
		{"address with a word as port", "redis localhost:redis", `redis: address "localhost:redis" is not valid`},
		{"cluster without address", "redis cluster", "redis: takes at least one address"},
		{"same address twice", "redis cluster a:1 a:1", "redis: an address is given twice"},
		{"unix socket of a cluster", "redis cluster unix:///run/redis.sock", "redis: address is a unix socket"},
		{"relative unix socket", "redis unix://run/redis.sock", "redis: address is a unix:// URL whose path is not absolute"},
		{"database of a cluster", "redis cluster redis://a:1/2", "redis: address has a database"},
		{"quorum of two", "redis quorum a:1 b:2", "redis: 2 addresses; a quorum needs an odd number"},
		{"quorum of one", "redis quorum a:1", "redis: 1 addresses; a quorum needs an odd number"},
		{"quorum with the same twice", "redis quorum a:1 b:1 a:1", "redis: an address is given twice"},
		{"quorum of one server", "redis quorum a:1 redis://a:1 redis://a:1/1", "redis: an address is given twice"},
		{"user without password", "redis redis://bob@a:1", "redis: username: without a password it would be ignored"},
		{"protocol", "protocol redlock", `protocol: "redlock" is neither getset nor token`},
		{"protocol in memory", "memory\nprotocol token", "protocol: locks live in memory or in redis"},
		{"memory with a protocol", "protocol token\nmemory", "memory: locks live in memory or in redis"},
		{"sentinel without master", "redis sentinel a:1", "redis: master_name: missing"},
		{"unknown scheme", "redis http://localhost:6379", `redis: address has the unknown scheme "http"`},
		{"bad URL", "redis redis://:pa/ss@localhost", "redis: address is not a valid redis:// URL"},
		{"bad database", "redis redis://localhost/one", "redis: address: redis: invalid database number"},
		{"URL option", "redis redis://localhost?read_timeout=5", `redis: address has the unknown URL option "read_timeout"`},
		{"URL without host", "redis redis:///1", "redis: address has no host"},
		{"option with a block", "memory {\nx\n}", "memory: takes no block"},
	} {
		t.Run(c.name, func(t *testing.T) {
			lines := strings.Count(c.options, "\n")
			if strings.Contains(c.options, "{\n") {
				lines = 1
			}
			for _, text := range []string{
				":80\nredis_lock {\n" + c.options + "\n}\n",
				"{\nredis_lock {\n" + c.options + "\n}\n}\n",
			} {
				config, err := adapt(text)
				if err == nil {
					t.Fatalf("adapted to %s", config)
				}
				if place := fmt.Sprintf("Caddyfile:%d", 3+lines); !strings.Contains(err.Error(), place) || !strings.Contains(err.Error(), c.want) {
					t.Errorf("error %q\nwant one with %q and %q", err, place, c.want)
				}
			}
		})
	}
	for _, c := range []struct{ options, want string }{
		{"user x", "redis: user: unknown option; known are db, dial_timeout"},
		{"password", "redis: password: takes one value, got 0"},
		{`password ""`, "redis: password: empty"},
		{"password a\npassword b", "redis: password: given twice"},
		{"db one", `redis: db: "one" is not a whole number`},
		{"db -1", "redis: db: -1 is negative"},
		{"master_name m", "redis: master_name: only sentinels know names"},
		{"sentinel_username u", "redis: sentinel_username: belongs to redis sentinel"},
		{"sentinel_password p", "redis: sentinel_password: belongs to redis sentinel"},
		{"tls yes", `redis: tls: takes no value, got "yes"`},
		{"tls_trusted_ca_certs", "redis: tls_trusted_ca_certs: takes at least one value"},
		{"tls_client_auth cert.pem", "redis: tls_client_auth: takes a certificate and its key, got 1 files"},
		{"dial_timeout 0s", "redis: dial_timeout: 0s is not more than 0"},
		{"op_timeout -1s", "redis: op_timeout: -1s is not more than 0"},
		{"dial_timeout 3s", "redis: dial_timeout: 3s is not shorter than op_timeout, 2s"},
		{"dial_timeout 2s", "redis: dial_timeout: 2s is not shorter than op_timeout, 2s"},
		{"username u", "redis: username: without a password it would be ignored"},
		{"pool_size 0", "redis: pool_size: 0 is not more than 0"},
		{"tls {\nx\n}", "redis: tls: takes no block"},
	} {
		_, err := adapt(":80\nredis_lock {\nredis a:1 {\n" + c.options + "\n}\n}\n")
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Count(err.Error(), "Caddyfile:") != 1 {
			t.Errorf("%s: error %v, want one with %q and the place", c.options, err, c.want)
		}
	}
	for _, c := range []struct{ name, text, want string }{
		{"username twice", ":80\nredis_lock {\nredis redis://u:p@a:1 {\nusername v\n}\n}", "redis: username: the address has one, too"},
		{"password twice", ":80\nredis_lock {\nredis redis://u:p@a:1 {\npassword v\n}\n}", "redis: password: the address has one, too"},
		{"database twice", ":80\nredis_lock {\nredis redis://a:1/1 {\ndb 2\n}\n}", "redis: db: the address has one, too"},
		{"database of a cluster", ":80\nredis_lock {\nredis cluster a:1 {\ndb 2\n}\n}", "redis: db: 2; a cluster has"},
		{"password for a sentinel", ":80\nredis_lock {\nredis sentinel redis://:p@a:1 {\nmaster_name m\n}\n}", "redis: address: a sentinel's has no user"},
		{"TLS on a unix socket", ":80\nredis_lock {\nredis unix:///a {\ntls\n}\n}", "redis: address is a unix socket"},
		{"fence of a quorum", ":80\nredis_lock {\nredis quorum a:1 b:1 c:1\nfence_header X-Fence\n}", "fence_header: a quorum has no fencing tokens"},
		{"fence of a global quorum", "{\nredis_lock {\nredis quorum a:1 b:1 c:1\n}\n}\n:80\nredis_lock {\nfence_header X-Fence\n}", "fence_header: a quorum has no fencing tokens"},
		{"token of a quorum", ":80\nredis_lock {\nredis quorum a:1 b:1 c:1\nprotocol token\n}", "protocol: a quorum speaks getset only"},
		{"dedupe with a quorum", ":80\nredis_lock {\nredis quorum a:1 b:1 c:1\ndedupe {header.A}\n}", "dedupe: a quorum does not tell deliveries apart"},
		{"supersede without wait", ":80\nredis_lock {\nsupersede\n}", "supersede: nobody waits, so that nobody could be displaced; set wait"},
		{"supersede without a line", ":80\nredis_lock {\nwait 1s\nqueue 0\nsupersede\n}", "supersede: nobody waits with queue 0"},
		{"supersede without a buffer", ":80\nredis_lock {\nwait 1s\nbuffer 0\nsupersede\n}", "supersede: a request whose body is not buffered cannot stay"},
		{"supersede that hangs up", ":80\nredis_lock {\nwait 1s\non_disconnect finish\nsupersede\n}", "supersede: on_disconnect finish would lose the newest request"},
		{"supersede that ends", ":80\nredis_lock {\nsupersede\nwait 1s\non_disconnect cancel\n}", "supersede: on_disconnect cancel would lose the newest request"},
		{"supersede with a quorum", ":80\nredis_lock {\nredis quorum a:1 b:1 c:1\nwait 1s\nsupersede\n}", "supersede: a quorum has no line"},
		{"supersede below a global on_disconnect", "{\nredis_lock {\non_disconnect cancel\n}\n}\n:80\nredis_lock {\nwait 1s\nsupersede\n}", "supersede: on_disconnect cancel would lose"},
		{"id of a body that is not buffered", ":80\nredis_lock {\nbuffer 0\ndedupe {http.redis_lock.json.id}\n}", "buffer: 0: a name or an id asks for the body"},
		{"name of a body that is not buffered", ":80\nredis_lock {http.redis_lock.form.a} {\nbuffer 0\n}", "buffer: 0: a name or an id asks for the body"},
		{"name that has no quotes", ":80\nredis_lock {\nname repository {http.redis_lock.json.repository.full_name}\n}", `name: "repository" always resolves, so that what follows never counts`},
		{"name with an unknown placeholder", ":80\nredis_lock {http.redis_lock.jsn.a}", "name: {http.redis_lock.jsn.a} is unknown"},
		{"name with a short placeholder", ":80\nredis_lock {redis_lock.json.a}", "name: {redis_lock.json.a} is unknown; ours begin with http.redis_lock."},
		{"name with an index in brackets", ":80\nredis_lock {http.redis_lock.json.changes[0].name}", "has an index in brackets; write changes.0.name"},
		{"two names", ":80\nredis_lock a b", "redis_lock takes one name, not 2"},
		{"empty name", ":80\nredis_lock \"\"", "name: empty"},
		{"name with an empty field", ":80\nredis_lock {http.redis_lock.form.}", "name: {http.redis_lock.form.} has no field"},
		{"name twice", ":80\nredis_lock a {\nname b\n}", "name: given twice"},
		{"global name", "{\nredis_lock {\nname x\n}\n}", "name: belongs to the directive"},
		{"global argument", "{\nredis_lock x\n}", "takes no name"},
		{"global twice", "{\nredis_lock {\nmemory\n}\nredis_lock {\nmemory\n}\n}", "given twice"},
	} {
		t.Run(c.name, func(t *testing.T) {
			config, err := adapt(c.text)
			if err == nil {
				t.Fatalf("adapted to %s", config)
			}
			if !strings.Contains(err.Error(), "Caddyfile:") || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %q, want one with %q and the place", err, c.want)
			}
		})
	}
}

// A password never gets into an error.
func TestAddressErrorsKeepPassword(t *testing.T) {
	for _, address := range []string{
		"redis://:geheim@localhost:x", "redis://u:geheim/x@localhost", "u:geheim@localhost",
		"http://u:geheim@localhost", "redis://:geheim@localhost/x", "redis://:geheim@localhost?x=1",
		"redis://:%zzgeheim@localhost", "redis://u:12/geheim@host:6379", "redis://u:12?geheim@host:6379", "redis://u:12#geheim@host:6379", "rediss://u:geheim@", "unix://u:geheim@?db=x",
	} {
		_, err := adapt(":80\nredis_lock {\nredis " + address + "\n}\n")
		if err == nil {
			t.Errorf("%s was accepted", address)
		} else if strings.Contains(err.Error(), "geheim") {
			t.Errorf("the password is in the error %q", err)
		}
	}
}

// What the Caddyfile refuses, Validate refuses in JSON.
func TestWrongJSON(t *testing.T) {
	for _, c := range []struct{ handler, want string }{
		{`"lifetime": "30s"`, "lifetime"},
		{`"name": [""]`, "name: empty"},
		{`"name": ["{http.redis_lock.json.a..b}", "a"]`, "name: {http.redis_lock.json.a..b} has an empty key"},
		{`"on_no_name": "x"`, "on_no_name: "},
		{`"methods": ["post"]`, "methods: "},
		{`"lease": "500ms"`, "lease: "},
		{`"wait": "-1s"`, "wait: "},
		{`"queue": -1`, "queue: "},
		{`"status": 99`, "status: "},
		{`"max_hold": "-1s"`, "max_hold: "},
		{`"buffer": -1`, "buffer: "},
		{`"buffer": 0, "name": ["{http.redis_lock.json.a}"]`, "buffer: 0: a name"},
		{`"on_disconnect": "x"`, "on_disconnect: "},
		{`"on_lost": "x"`, "on_lost: "},
		{`"fence_header": "Connection"`, "fence_header: "},
		{`"prefix": "{}"`, "prefix: "},
		{`"on_redis_error": "x"`, "on_redis_error: "},
		{`"dedupe": {}`, "dedupe: has no id"},
		{`"dedupe": {"id": "{path}", "window": "-1s"}`, "dedupe: -1s is not more than 0"},
		{`"dedupe": {"id": "{path}"}, "redis": {"mode": "quorum", "address": ["a:1", "b:1", "c:1"]}`, "dedupe: a quorum does not"},
		{`"supersede": 202`, "supersede: nobody waits"},
		{`"supersede": 100, "wait": "1s"`, "supersede: 100 is not a status"},
		{`"supersede": 202, "wait": "1s", "on_disconnect": "finish"`, "supersede: on_disconnect finish"},
		{`"redis": {}`, "redis: 0 addresses"},
		{`"protocol": "x"`, "protocol: "},
		{`"memory": true, "protocol": "token"`, "protocol: locks live in memory"},
		{`"redis": {"mode": "quorum", "address": ["a:1", "b:1", "c:1"]}, "fence_header": "X-Fence"`, "fence_header: a quorum has no"},
		{`"redis": {"mode": "ring", "address": ["a:1"]}`, `redis: mode: "ring" is neither cluster nor sentinel nor quorum`},
		{`"redis": {"address": ["redis://a:1", "rediss://a:2"], "mode": "cluster"}`, "redis: addresses differ in their scheme"},
		{`"redis": {"address": ["redis://u:p@a:1", "redis://u:q@a:2"], "mode": "cluster"}`, "redis: addresses of one cluster differ"},
		{`"redis": {"address": ["a:1"], "op_timeout": "-1s"}`, "redis: op_timeout: -1s is negative"},
		{`"redis": {"address": ["a:1"], "pool_size": -1}`, "redis: pool_size: -1 is negative"},
		{`"redis": {"address": ["a:1"], "password": "a{b}c"}`, `redis: password: has a placeholder that is neither`},
		{`"redis": {"address": ["a:1"], "password": "{env.REDIS_LOCK_NOT_SET}"}`, "redis: password: evaluated placeholder"},
		{`"redis": {"address": ["a:1"], "tls_trusted_ca_certs": ["/none.pem"]}`, "redis: tls_trusted_ca_certs: open /none.pem"},
		{`"redis": {"address": ["a:1"], "tls_client_auth": ["/none.pem", "/none.key"]}`, "redis: tls_client_auth: open /none.pem"},
		{`"redis": {"address": ["localhost"]}`, "redis: address"},
		{`"redis": {"address": ["{env.REDIS_LOCK_NOT_SET}"]}`, "redis: address: evaluated placeholder"},
		{`"memory": true, "redis": {"address": ["localhost:1"]}`, "memory: "},
	} {
		err := validate(`{"apps": {"http": {"servers": {"x": {"routes": [{"handle": [{"handler": "redis_lock", ` + c.handler + `}]}]}}}}}`)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", c.handler, err, c.want)
		}
	}
}

// Whatever the text, parsing it gives a valid handler or an error, and does not panic.
func FuzzCaddyfile(f *testing.F) {
	for _, text := range []string{
		"redis_lock",
		"redis_lock name {\n\tlease 30s\n\twait 5s\n\tqueue 3\n}",
		"redis_lock {\n\tname a {x}\n\tmethods unsafe\n\tmemory\n}",
		"redis_lock {\n\tredis redis://u:p@h:1/2\n\tprefix p.\n\tstatus 503\n\ton_no_name pass\n\ton_redis_error pass\n}",
		"redis_lock {\n\tredis unix:///run/redis.sock?db=1\n}",
		"redis_lock {\n\tredis sentinel a:1 b:2 {\n\t\tmaster_name m\n\t\tpassword p\n\t\ttls\n\t\top_timeout 1s\n\t}\n}",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		h := new(redislock.Handler)
		if err := h.UnmarshalCaddyfile(caddyfile.NewTestDispenser(text)); err != nil {
			return
		}
		ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
		defer cancel()
		defer h.Cleanup()
		if err := h.Provision(ctx); err != nil {
			if strings.Contains(text, "{") {
				return // a placeholder that does not resolve, or a file that is not there
			}
			t.Fatalf("provision %q: %v", text, err)
		}
		if err := h.Validate(); err != nil {
			t.Fatalf("the Caddyfile was accepted, the handler is not valid: %q: %v", text, err)
		}
	})
}
