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
//		on_disconnect  finish|cancel
//		on_lost        cancel|continue
//		fence_header   <field>
//		status         <code>
//		prefix         <string>
//		on_redis_error reject|pass
//		redis          <address|url>
//		memory
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
	return h.parseBlock(d, given)
}

// parseBlock reads the options. given has those that were read before.
func (h *Handler) parseBlock(d *caddyfile.Dispenser, given map[string]bool) error {
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		option := d.Val()
		parse, known := parsers[option]
		if !known {
			return d.Errf("%s: unknown option; known are %s", option, knownOptions)
		}
		if given[option] {
			return d.Errf("%s: given twice", option)
		}
		given[option] = true
		if given["memory"] && given["redis"] {
			return d.Errf("%s: %v", option, errMemoryAndRedis)
		}
		if err := parse(h, d.RemainingArgs()); err != nil {
			return d.Errf("%s: %v", option, err)
		}
		if d.NextBlock(d.Nesting()) {
			return d.Errf("%s: takes no block", option)
		}
	}
	return nil
}

// A parser reads the arguments of one option. They replace what the handler had before.
type parser func(h *Handler, args []string) error

var parsers = map[string]parser{
	"name":           list(checkNames, func(h *Handler, v []string) { h.Name = v }),
	"on_no_name":     one(text, checkOneOf(reject, pass), func(h *Handler, v string) { h.OnNoName = v }),
	"methods":        list(checkMethods, func(h *Handler, v []string) { h.Methods = v }),
	"lease":          one(duration, lock.CheckLease, func(h *Handler, v time.Duration) { h.Lease = caddy.Duration(v) }),
	"wait":           one(duration, checkNotNegative, func(h *Handler, v time.Duration) { h.Wait = caddy.Duration(v) }),
	"queue":          one(number, checkNotNegative, func(h *Handler, v int) { h.Queue = &v }),
	"max_hold":       one(duration, checkMaxHold, func(h *Handler, v time.Duration) { h.MaxHold = caddy.Duration(v) }),
	"buffer":         one(size, checkNotNegative, func(h *Handler, v int64) { h.Buffer = &v }),
	"on_disconnect":  one(text, checkOneOf(finishRun, stayRun, cancelRun), func(h *Handler, v string) { h.OnDisconnect = v }),
	"on_lost":        one(text, checkOneOf(cancelRun, continueRun), func(h *Handler, v string) { h.OnLost = v }),
	"fence_header":   one(text, checkFenceHeader, func(h *Handler, v string) { h.FenceHeader = v }),
	"status":         one(number, checkStatus, func(h *Handler, v int) { h.Status = v }),
	"prefix":         one(text, lock.CheckPrefix, func(h *Handler, v string) { h.Prefix = v }),
	"on_redis_error": one(text, checkOneOf(reject, pass), func(h *Handler, v string) { h.OnRedisError = v }),
	"redis":          list(checkAddresses, func(h *Handler, v []string) { h.Redis, h.Memory = &Redis{Address: v}, false }),
	"memory":         none(func(h *Handler) { h.Redis, h.Memory = nil, true }),
}

var knownOptions = strings.Join(slices.Sorted(maps.Keys(parsers)), ", ")

func none(set func(*Handler)) parser {
	return func(h *Handler, args []string) error {
		if len(args) > 0 {
			return fmt.Errorf("takes no value, got %q", args[0])
		}
		set(h)
		return nil
	}
}

func one[T any](read func(string) (T, error), check func(T) error, set func(*Handler, T)) parser {
	return func(h *Handler, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("takes one value, got %d", len(args))
		}
		value, err := read(args[0])
		if err != nil {
			return err
		}
		set(h, value)
		return check(value)
	}
}

func list(check func([]string) error, set func(*Handler, []string)) parser {
	return func(h *Handler, args []string) error {
		if len(args) == 0 {
			return errors.New("takes at least one value, got none")
		}
		set(h, args)
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

func checkAddresses(addresses []string) error { return (&Redis{Address: addresses}).check() }

// Interface guard
var _ caddyfile.Unmarshaler = (*Handler)(nil)
