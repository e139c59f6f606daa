package redislock

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/dustin/go-humanize"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

const directive = "redis_lock"

func init() {
	// After authentication and rewrites, and around everything that answers.
	httpcaddyfile.RegisterDirectiveOrder(directive, httpcaddyfile.Before, "invoke")
	httpcaddyfile.RegisterHandlerDirective(directive, parseDirective)
	httpcaddyfile.RegisterGlobalOption(directive, parseGlobalOption)
}

// parseDirective reads the directive, over the defaults of the global option of the same name.
func parseDirective(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h := new(Handler)
	if defaults, ok := helper.Option(directive).(Handler); ok {
		*h = defaults
	}
	return h, h.UnmarshalCaddyfile(helper.Dispenser)
}

// parseGlobalOption reads the options that directives have as their defaults. They are folded
// into each handler while adapting, so that its JSON stands alone.
func parseGlobalOption(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next()
	if existing != nil {
		return nil, d.Errf("the global option %s is given twice", directive)
	}
	if d.CountRemainingArgs() > 0 {
		return nil, d.Errf("the global option %s takes no name: names belong to the directive", directive)
	}
	var h Handler
	if err := h.parseBlock(d, map[string]bool{}); err != nil {
		return nil, err
	}
	if h.Name != nil {
		return nil, d.Errf("name: belongs to the directive, not to the global option %s", directive)
	}
	if h.Dedupe != nil { // Caddy expands {header.*} and other shorthands in sites only
		id := caddyfile.Segment{{Text: h.Dedupe.ID}}
		httpcaddyfile.NewShorthandReplacer().ApplyToSegment(&id)
		h.Dedupe.ID = id[0].Text
	}
	return h, nil
}

// UnmarshalCaddyfile reads the directive. What it does not mention stays as it is. Syntax:
//
//	redis_lock [<matcher>] [<name>] {
//		name           <name>...
//		on_no_name     reject|pass
//		methods        <method>...|unsafe
//		lease          <duration>
//		wait           <duration>
//		queue          <n>
//		max_hold       <duration>
//		buffer         <size>
//		on_disconnect  finish|stay|cancel
//		on_lost        cancel|continue
//		fence_header   <field>
//		status         <code>
//		prefix         <string>
//		on_redis_error reject|pass
//		protocol       getset|token
//		redis          [cluster|sentinel|quorum] <address|url>... {
//			username                 <user>
//			password                 <password>
//			db                       <n>
//			master_name              <name>
//			sentinel_username        <user>
//			sentinel_password        <password>
//			tls
//			tls_server_name          <name>
//			tls_trusted_ca_certs     <pem>...
//			tls_client_auth          <cert> <key>
//			tls_insecure_skip_verify
//			dial_timeout             <duration>
//			op_timeout               <duration>
//			pool_size                <n>
//		}
//		memory
//		dedupe         <id> [<window>]
//		supersede      [<status>]
//	}
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	given := make(map[string]bool)
	if args := d.RemainingArgs(); len(args) > 1 {
		return d.Errf("%s takes one name, not %d; several go into its name option", directive, len(args))
	} else if len(args) == 1 {
		given["name"] = true
		h.Name = args
		if err := checkNames(args); err != nil {
			return d.Errf("name: %v", err)
		}
	}
	if err := h.parseBlock(d, given); err != nil {
		return err
	}
	// What fits together is known only now: some of it may come from the global option.
	if err := h.checkFenceHeader(); err != nil {
		return d.Errf("fence_header: %v", err)
	}
	if err := h.checkProtocol(); err != nil {
		return d.Errf("protocol: %v", err)
	}
	if err := h.checkBuffer(); err != nil {
		return d.Errf("buffer: %v", err)
	}
	if err := h.checkDedupe(); err != nil {
		return d.Errf("dedupe: %v", err)
	}
	if err := h.checkSupersede(); err != nil {
		return d.Errf("supersede: %v", err)
	}
	return nil
}

// parseBlock reads the options. given has those that were read before.
func (h *Handler) parseBlock(d *caddyfile.Dispenser, given map[string]bool) error {
	if err := parseOptions(d, h, parsers, given); err != nil {
		return d.WrapErr(err)
	}
	return nil
}

// parseOptions reads a block of options into target.
func parseOptions[T any](d *caddyfile.Dispenser, target *T, parsers map[string]parser[T], given map[string]bool) error {
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		option := d.Val()
		parse, known := parsers[option]
		if !known {
			return fmt.Errorf("%s: unknown option; known are %s", option, strings.Join(slices.Sorted(maps.Keys(parsers)), ", "))
		}
		if given[option] {
			return fmt.Errorf("%s: given twice", option)
		}
		given[option] = true
		if given["memory"] && (given["redis"] || given["protocol"]) {
			return fmt.Errorf("%s: %w", option, errMemoryAndRedis)
		}
		if err := parse(target, d); err != nil {
			return fmt.Errorf("%s: %w", option, err)
		}
		if d.NextBlock(d.Nesting()) {
			return fmt.Errorf("%s: takes no block", option)
		}
	}
	return nil
}

// A parser reads one option, whose name was read, into a target. It replaces what was there.
type parser[T any] func(target *T, d *caddyfile.Dispenser) error

var parsers = map[string]parser[Handler]{
	"name":           list(checkNames, func(h *Handler, v []string) { h.Name = v }),
	"on_no_name":     one(text, checkOneOf(reject, pass), func(h *Handler, v string) { h.OnNoName = v }),
	"methods":        list(checkMethods, func(h *Handler, v []string) { h.Methods = v }),
	"lease":          one(duration, lock.CheckLease, func(h *Handler, v time.Duration) { h.Lease = caddy.Duration(v) }),
	"wait":           one(duration, checkNotNegative, func(h *Handler, v time.Duration) { h.Wait = caddy.Duration(v) }),
	"queue":          one(number, checkNotNegative, func(h *Handler, v int) { h.Queue = &v }),
	"max_hold":       one(duration, checkPositive, func(h *Handler, v time.Duration) { h.MaxHold = caddy.Duration(v) }),
	"buffer":         one(size, checkNotNegative, func(h *Handler, v int64) { h.Buffer = &v }),
	"on_disconnect":  one(text, checkOneOf(finishRun, stayRun, cancelRun), func(h *Handler, v string) { h.OnDisconnect = v }),
	"on_lost":        one(text, checkOneOf(cancelRun, continueRun), func(h *Handler, v string) { h.OnLost = v }),
	"fence_header":   one(text, checkFenceHeader, func(h *Handler, v string) { h.FenceHeader = v }),
	"status":         one(number, checkStatus, func(h *Handler, v int) { h.Status = v }),
	"prefix":         one(text, lock.CheckPrefix, func(h *Handler, v string) { h.Prefix = v }),
	"on_redis_error": one(text, checkOneOf(reject, pass), func(h *Handler, v string) { h.OnRedisError = v }),
	"protocol":       one(text, checkOneOf(getsetProtocol, tokenProtocol), func(h *Handler, v string) { h.Protocol = v }),
	"redis":          parseRedis,
	"memory":         none(func(h *Handler) { h.Redis, h.Protocol, h.Memory = nil, "", true }),
	"dedupe":         parseDedupe,
	"supersede":      parseSupersede,
}

// redisParsers are for the block of the option redis.
var redisParsers = map[string]parser[Redis]{
	"username":                 one(text, checkNotEmpty, func(r *Redis, v string) { r.Username = v }),
	"password":                 one(text, checkNotEmpty, func(r *Redis, v string) { r.Password = v }),
	"db":                       one(number, checkNotNegative, func(r *Redis, v int) { r.DB = v }),
	"master_name":              one(text, checkNotEmpty, func(r *Redis, v string) { r.MasterName = v }),
	"sentinel_username":        one(text, checkNotEmpty, func(r *Redis, v string) { r.SentinelUsername = v }),
	"sentinel_password":        one(text, checkNotEmpty, func(r *Redis, v string) { r.SentinelPassword = v }),
	"tls":                      none(func(r *Redis) { r.TLS = true }),
	"tls_server_name":          one(text, checkNotEmpty, func(r *Redis, v string) { r.TLSServerName = v }),
	"tls_trusted_ca_certs":     list(checkNoneEmpty, func(r *Redis, v []string) { r.TLSTrustedCACerts = v }),
	"tls_client_auth":          list(checkNoneEmpty, func(r *Redis, v []string) { r.TLSClientAuth = v }),
	"tls_insecure_skip_verify": none(func(r *Redis) { r.TLSInsecureSkipVerify = true }),
	"dial_timeout":             one(duration, checkPositive, func(r *Redis, v time.Duration) { r.DialTimeout = caddy.Duration(v) }),
	"op_timeout":               one(duration, checkPositive, func(r *Redis, v time.Duration) { r.OpTimeout = caddy.Duration(v) }),
	"pool_size":                one(number, checkPositive, func(r *Redis, v int) { r.PoolSize = v }),
}

// parseRedis reads `redis [cluster|sentinel|quorum] <address>... [{ ... }]`.
func parseRedis(h *Handler, d *caddyfile.Dispenser) error {
	args := d.RemainingArgs()
	r := new(Redis)
	if len(args) > 0 && slices.Contains(redisModes, args[0]) {
		r.Mode, args = args[0], args[1:]
	}
	if len(args) == 0 {
		return errors.New("takes at least one address, got none")
	}
	r.Address = args
	h.Redis, h.Memory = r, false
	if err := parseOptions(d, r, redisParsers, map[string]bool{}); err != nil {
		return err
	}
	return r.check()
}

// parseDedupe reads `dedupe <id> [<window>]`.
func parseDedupe(h *Handler, d *caddyfile.Dispenser) error {
	args := d.RemainingArgs()
	if len(args) < 1 || len(args) > 2 {
		return fmt.Errorf("takes an id and, if need be, a window, got %d values", len(args))
	}
	h.Dedupe = &Dedupe{ID: args[0], Window: caddy.Duration(defaultWindow)}
	if len(args) == 2 {
		window, err := duration(args[1])
		if err != nil {
			return err
		}
		h.Dedupe.Window = caddy.Duration(window)
	}
	return h.Dedupe.check()
}

// parseSupersede reads `supersede [<status>]`.
func parseSupersede(h *Handler, d *caddyfile.Dispenser) error {
	args := d.RemainingArgs()
	h.Supersede = defaultDisplaced
	switch {
	case len(args) > 1:
		return fmt.Errorf("takes one status at most, got %d values", len(args))
	case len(args) == 0:
		return nil
	}
	status, err := number(args[0])
	if err != nil {
		return err
	}
	h.Supersede = status
	return checkDisplaced(status)
}

func none[T any](set func(*T)) parser[T] {
	return func(target *T, d *caddyfile.Dispenser) error {
		if args := d.RemainingArgs(); len(args) > 0 {
			return fmt.Errorf("takes no value, got %q", args[0])
		}
		set(target)
		return nil
	}
}

func one[T, V any](read func(string) (V, error), check func(V) error, set func(*T, V)) parser[T] {
	return func(target *T, d *caddyfile.Dispenser) error {
		args := d.RemainingArgs()
		if len(args) != 1 {
			return fmt.Errorf("takes one value, got %d", len(args))
		}
		value, err := read(args[0])
		if err != nil {
			return err
		}
		set(target, value)
		return check(value)
	}
}

func list[T any](check func([]string) error, set func(*T, []string)) parser[T] {
	return func(target *T, d *caddyfile.Dispenser) error {
		args := d.RemainingArgs()
		if len(args) == 0 {
			return errors.New("takes at least one value, got none")
		}
		set(target, args)
		return check(args)
	}
}

func text(s string) (string, error) { return s, nil }

func number(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0, fmt.Errorf("%q is not a whole number", s)
	}
	return n, nil
}

func size(s string) (int64, error) {
	n, err := humanize.ParseBytes(s)
	if err != nil || n > math.MaxInt64/2 {
		return 0, fmt.Errorf("%q is not a size, such as 1MiB", s)
	}
	return int64(n), nil
}

func duration(s string) (time.Duration, error) {
	d, err := caddy.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration with a unit, such as 30s", s)
	}
	return d, nil
}

// Interface guard
var _ caddyfile.Unmarshaler = (*Handler)(nil)
