package redislock

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"go.uber.org/zap"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

const defaultAddress = "127.0.0.1:6379"

// Redis says which Redis the locks live in.
type Redis struct {
	// One address: `host:port`, `redis://[user:password@]host[:port][/db]`, the same with
	// `rediss://` for TLS, or `unix://[user:password@]/path[?db=n]`. Special characters of a
	// password are percent-encoded. The placeholders `{env.*}` and `{file.*}` are resolved when
	// Caddy loads its configuration.
	Address []string `json:"address,omitempty"`
}

// A backend is where a handler's locks live.
type backend interface {
	// use returns the Locker, and a function to call when the request is done with it.
	use() (l *lock.Locker, done func(), err error)
	close() error
}

// inProcess is the backend of `memory`: one table of locks for all handlers, kept across
// reloads.
type inProcess struct{}

var inProcessLocker = lock.New(lock.NewMemory(), lock.Options{})

func (inProcess) use() (*lock.Locker, func(), error) { return inProcessLocker, func() {}, nil }

func (inProcess) close() error { return nil }

// redisLockers has one Locker, with its connections and its lines of waiting requests, for
// each Redis in use, whatever the number of handlers and of configurations that come and go.
// Its keys are hashes, as the options have passwords in them.
var redisLockers = caddy.NewUsagePool()

// sharedRedis is a share in one of the redisLockers.
type sharedRedis struct {
	key     [sha256.Size]byte
	options redis.Options
}

func openRedis(config *Redis) (*sharedRedis, error) {
	quietClients()
	address, err := config.resolve()
	if err != nil {
		return nil, err
	}
	options, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	// The Store repeats by itself what is worth repeating; see lock.NewGetSet.
	options.MaxRetries = -1
	options.DialerRetries = 1
	options.ContextTimeoutEnabled = true
	// Connecting must end before the operation does: only then it is known that nothing was sent.
	options.DialTimeout = lock.DefaultOpTimeout * 3 / 4
	options.DisableIdentity = true
	options.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	identity := fmt.Sprintf("%q %q %q %q %d %v",
		options.Network, options.Addr, options.Username, options.Password, options.DB, options.TLSConfig != nil)
	s := &sharedRedis{key: sha256.Sum256([]byte(identity)), options: *options}
	if _, _, err := s.use(); err != nil {
		return nil, err
	}
	return s, nil
}

// quietClients sends what go-redis says on its own, otherwise a line on standard error for
// each failed connection, to Caddy's log. What matters of it is in the errors, too.
var quietClients = sync.OnceFunc(func() { redis.SetLogger(clientLog{}) })

type clientLog struct{}

func (clientLog) Printf(_ context.Context, format string, args ...any) {
	if c := caddy.Log().Named("redis").Check(zap.DebugLevel, "client"); c != nil {
		c.Write(zap.String("message", fmt.Sprintf(format, args...)))
	}
}

// use takes another share: Caddy closes a configuration's own while requests of it are still
// in flight.
func (s *sharedRedis) use() (*lock.Locker, func(), error) {
	shared, _, err := redisLockers.LoadOrNew(s.key, func() (caddy.Destructor, error) {
		options := s.options // the client fills in what is missing
		return redisLocker{lock.New(lock.NewGetSet(redis.NewClient(&options)), lock.Options{
			OnOutage: func(err error) {
				logger().Error("redis is unavailable", zap.String("redis", options.Addr), zap.Error(err))
			},
			OnRecovery: func(away time.Duration) {
				logger().Info("redis is available again", zap.String("redis", options.Addr), zap.Duration("away", away))
			},
			OnDeaf: func(err error) {
				logger().Warn("redis does not tell of locks that are handed over; waiting requests find out by asking, which is slower. "+
					"Allow its user SUBSCRIBE and PUBLISH on the channels redis_lock:*", zap.String("redis", options.Addr), zap.Error(err))
			},
		})}, nil
	})
	if err != nil {
		return nil, nil, err
	}
	return shared.(redisLocker).Locker, func() { _ = s.close() }, nil
}

func (s *sharedRedis) close() error {
	_, err := redisLockers.Delete(s.key)
	return err
}

// logger outlives configurations, as Lockers do.
func logger() *zap.Logger { return caddy.Log().Named(string(Handler{}.CaddyModule().ID)) }

type redisLocker struct{ *lock.Locker }

// Destruct closes the connections, after the last release that is still under way in the
// background: Caddy must not wait for that.
func (l redisLocker) Destruct() error {
	noTime, cancel := context.WithCancel(context.Background())
	cancel()
	if err := l.Close(noTime); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// resolve returns the address without placeholders.
func (r *Redis) resolve() (string, error) {
	if err := r.check(); err != nil {
		return "", err
	}
	address, err := caddy.NewReplacer().ReplaceOrErr(r.Address[0], true, true)
	if err != nil {
		return "", fmt.Errorf("address: %w", err)
	}
	return address, nil
}

// check refuses what can be told before placeholders are resolved.
func (r *Redis) check() error {
	if len(r.Address) != 1 {
		return fmt.Errorf("%d addresses; give one", len(r.Address))
	}
	if strings.Contains(r.Address[0], "{") {
		return nil
	}
	_, err := parseAddress(r.Address[0])
	return err
}

// parseAddress never puts the address into its errors when it may have a password in it.
func parseAddress(address string) (*redis.Options, error) {
	const want = "want host:port, or a redis://, rediss:// or unix:// URL"
	scheme, _, isURL := strings.Cut(address, "://")
	if !isURL {
		host, port, err := net.SplitHostPort(address)
		if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host == "" {
			if strings.Contains(address, "@") {
				return nil, errors.New("address is not valid: " + want)
			}
			return nil, fmt.Errorf("address %q is not valid: %s", address, want)
		}
		return &redis.Options{Network: "tcp", Addr: address}, nil
	}
	switch scheme {
	case "redis", "rediss", "unix":
	default:
		return nil, fmt.Errorf("address has the unknown scheme %q: %s", scheme, want)
	}
	u, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("address is not a valid %s:// URL; percent-encode special characters of the password", scheme)
	}
	for option := range u.Query() {
		if option != "db" {
			return nil, fmt.Errorf("address has the unknown URL option %q; only db is known", option)
		}
	}
	if scheme != "unix" && u.Hostname() == "" {
		return nil, fmt.Errorf("address has no host: %s", want)
	}
	options, err := redis.ParseURL(address)
	if err != nil {
		return nil, fmt.Errorf("address: %w", err)
	}
	return options, nil
}
