package redislock

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

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
	key      [sha256.Size]byte
	config   *Redis // without placeholders
	protocol string
	clients  []*redis.UniversalOptions
}

func openRedis(config *Redis, protocol string) (*sharedRedis, error) {
	quietClients()
	resolved, err := config.resolve()
	if err != nil {
		return nil, err
	}
	s := &sharedRedis{config: resolved, protocol: protocol}
	if s.clients, err = resolved.clients(); err != nil {
		return nil, err
	}
	if s.key, err = resolved.hash(protocol); err != nil {
		return nil, err
	}
	_, _, err = s.use()
	return s, err
}

// hash tells configurations apart, by the contents of certificates, too: they may be renewed
// under their old names.
func (r *Redis) hash(protocol string) (sum [sha256.Size]byte, err error) {
	text, err := json.Marshal(r)
	if err != nil {
		return sum, err
	}
	text = append(text, protocol...)
	for _, file := range slices.Concat(r.TLSTrustedCACerts, r.TLSClientAuth) {
		pem, err := os.ReadFile(file)
		if err != nil {
			return sum, err
		}
		text = append(text, pem...)
	}
	return sha256.Sum256(text), nil
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
	shared, _, err := redisLockers.LoadOrNew(s.key, func() (caddy.Destructor, error) { return newRedisLocker(s), nil })
	if err != nil {
		return nil, nil, err
	}
	return shared.(*redisLocker).Locker, func() { _ = s.close() }, nil
}

func (s *sharedRedis) close() error {
	_, err := redisLockers.Delete(s.key)
	return err
}

// redisLocker is a Locker, and someone who looks once at the Redis behind it.
type redisLocker struct {
	*lock.Locker
	stopLooking context.CancelFunc
}

func newRedisLocker(s *sharedRedis) *redisLocker {
	log := caddy.Log().Named(string(Handler{}.CaddyModule().ID)).With( // outlives configurations, as Lockers do
		zap.String("redis", strings.Join(s.addresses(), " ")), zap.String("mode", cmp.Or(s.config.Mode, "one server")))
	clients := s.connect()
	l := &redisLocker{}
	l.Locker = lock.New(s.store(clients, log), lock.Options{
		OpTimeout: s.config.opTimeout(),
		OnOutage: func(err error) {
			if away, ok := errors.AsType[*lock.UnavailableError](err); ok {
				err = away.Err // that it is unavailable is the entry's message
			}
			log.Error("redis is unavailable", zap.Error(err), zap.String("remedy", remedy(err)))
		},
		OnRecovery: func(away time.Duration) {
			log.Info("redis is available again", zap.Duration("away", away))
		},
		OnDeaf: func(err error) {
			log.Warn("redis does not tell of locks that are handed over; waiting requests find out by asking, which is slower. "+
				"Allow its user SUBSCRIBE and PUBLISH (in a cluster SSUBSCRIBE and SPUBLISH) on the channels redis_lock:*", zap.Error(err))
		},
	})
	log.Info("locks live in redis", zap.String("protocol", s.protocol), zap.Int("db", s.clients[0].DB), zap.Bool("tls", s.clients[0].TLSConfig != nil))
	ctx, stop := context.WithCancel(context.Background())
	l.stopLooking = stop
	for i, client := range clients {
		log := log
		if len(clients) > 1 {
			log = log.With(zap.String("server", s.clients[i].Addrs[0]))
		}
		go look(ctx, client, log)
	}
	return l
}

// addresses returns where the servers are, without what else URLs say.
func (s *sharedRedis) addresses() (all []string) {
	for _, options := range s.clients {
		all = append(all, options.Addrs...)
	}
	return all
}

func (s *sharedRedis) connect() (clients []redis.UniversalClient) {
	for _, options := range s.clients {
		own := *options // the client fills in what is missing, and a cluster's adds nodes
		own.Addrs = slices.Clone(options.Addrs)
		clients = append(clients, redis.NewUniversalClient(&own))
	}
	return clients
}

func (s *sharedRedis) store(clients []redis.UniversalClient, log *zap.Logger) lock.Store {
	switch {
	case s.config.Mode == quorumMode:
		var nodes []lock.Node
		for i, client := range clients {
			log := log.With(zap.String("server", s.clients[i].Addrs[0]))
			nodes = append(nodes, lock.Node{
				Store: lock.NewGetSetNode(client),
				OnOutage: func(err error) {
					log.Warn("a server of the quorum is unavailable", zap.Error(err), zap.String("remedy", remedy(err)))
				},
				OnRecovery: func(away time.Duration) {
					log.Info("a server of the quorum is available again", zap.Duration("away", away))
				},
			})
		}
		return lock.NewQuorum(nodes...)
	case s.protocol == tokenProtocol:
		return lock.NewToken(clients[0])
	}
	return lock.NewGetSet(clients[0])
}

// Destruct closes the connections, after the last release that is still under way in the
// background: Caddy must not wait for that, nor for a look at a Redis that hangs.
func (l *redisLocker) Destruct() error {
	l.stopLooking()
	noTime, cancel := context.WithCancel(context.Background())
	cancel()
	if err := l.Close(noTime); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
