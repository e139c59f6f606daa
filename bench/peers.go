package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"

	"net"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// lease is the same for everybody, and longer than anything here is held.
const lease = 30 * time.Second

// A locker runs work with the lock called name, for which it waits if it can wait at all.
type locker interface {
	with(ctx context.Context, name string, work func()) error
	close() error
}

// A contender is one way to lock, opened on the Redis at an address.
type contender struct {
	name  string
	about string
	waits bool // can wait for a lock that is held, and so takes part in the contended section
	open  func(address string) (locker, error)
}

// Names that the sections and the bars speak of.
const (
	ours    = "lock"
	bsm     = "bsm/redislock"
	reds    = "redsync"
	rueidi  = "rueidislock"
	plain   = "SETNX+DEL"
	floor   = "floor"
	without = "no module"
)

// contenders are all of them, in the order of the tables.
var contenders = []contender{
	{ours, "this repository's package lock", true, openOurs},
	{bsm, "github.com/bsm/redislock, retrying every 10 ms", true, openBSM},
	{reds, "github.com/go-redsync/redsync/v4 on one node, its own retry delay (50 to 250 ms)", true, openRedsync},
	{rueidi, "github.com/redis/rueidis/rueidislock, majority of one, NOLOOP", true, openRueidis},
	{plain, "go-redis, SET NX EX and DEL, no owner checked", false, openPlain},
	{floor, "two raw round trips (PING) on a connection of the caller's own", false, openFloor},
}

func contenderNamed(name string) (contender, error) {
	for _, c := range contenders {
		if c.name == name {
			return c, nil
		}
	}
	return contender{}, fmt.Errorf("no contender is called %q", name)
}

// goRedis are the options of all contenders on go-redis, with its default pool. A feature that
// asks for push notifications is off, as Redis 7 does not have it.
func goRedis(address string) *redis.Options {
	return &redis.Options{
		Addr:                     address,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
}

type ourLocker struct {
	*lock.Locker
	options []lock.AcquireOption
}

func openOurs(address string) (locker, error) {
	options := goRedis(address)
	options.MaxRetries = -1 // as lock.NewGetSet wants it
	options.PipelinePoolSize = -1
	options.ContextTimeoutEnabled = true
	return &ourLocker{
		lock.New(lock.NewGetSet(redis.NewClient(options)), lock.Options{}),
		[]lock.AcquireOption{lock.Wait(time.Minute), lock.Queue(1000), lock.Lease(lease)},
	}, nil
}

func (l *ourLocker) with(ctx context.Context, name string, work func()) error {
	h, err := l.Acquire(ctx, name, l.options...)
	if err != nil {
		return err
	}
	work()
	return h.Release(ctx)
}

func (l *ourLocker) close() error { return l.Close(context.Background()) }

type bsmLocker struct {
	client  *redis.Client
	locks   *redislock.Client
	options *redislock.Options
}

func openBSM(address string) (locker, error) {
	client := redis.NewClient(goRedis(address))
	return &bsmLocker{client, redislock.New(client), &redislock.Options{
		RetryStrategy: redislock.LinearBackoff(10 * time.Millisecond),
	}}, nil
}

func (l *bsmLocker) with(ctx context.Context, name string, work func()) error {
	held, err := l.locks.Obtain(ctx, name, lease, l.options)
	if err != nil {
		return err
	}
	work()
	return held.Release(ctx)
}

func (l *bsmLocker) close() error { return l.client.Close() }

type redsyncLocker struct {
	client *redis.Client
	sync   *redsync.Redsync
}

func openRedsync(address string) (locker, error) {
	client := redis.NewClient(goRedis(address))
	return &redsyncLocker{client, redsync.New(goredis.NewPool(client))}, nil
}

func (l *redsyncLocker) with(ctx context.Context, name string, work func()) error {
	// Its 32 tries are over before everybody has had a turn.
	mutex := l.sync.NewMutex(name, redsync.WithExpiry(lease), redsync.WithTries(1<<20))
	if err := mutex.LockContext(ctx); err != nil {
		return err
	}
	work()
	_, err := mutex.UnlockContext(ctx)
	return err
}

func (l *redsyncLocker) close() error { return l.client.Close() }

type rueidisLocker struct{ rueidislock.Locker }

func openRueidis(address string) (locker, error) {
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption:   rueidis.ClientOption{InitAddress: []string{address}},
		KeyMajority:    1, // as everybody else here
		NoLoopTracking: true,
		KeyValidity:    lease,
		// Its time-out for one attempt, after which it waits for an invalidation that may
		// never come. The default of 20 ms is too short for a machine that is busy.
		TryNextAfter: time.Second,
	})
	if err != nil {
		return nil, err
	}
	return rueidisLocker{l}, nil
}

func (l rueidisLocker) with(ctx context.Context, name string, work func()) error {
	_, release, err := l.WithContext(ctx, name)
	if err != nil {
		return err
	}
	work()
	release()
	return nil
}

func (l rueidisLocker) close() error {
	l.Close()
	return nil
}

type plainLocker struct{ client *redis.Client }

func openPlain(address string) (locker, error) {
	return plainLocker{redis.NewClient(goRedis(address))}, nil
}

var errHeld = errors.New("held by somebody else")

func (l plainLocker) with(ctx context.Context, name string, work func()) error {
	taken, err := l.client.SetNX(ctx, name, 1, lease).Result()
	if err != nil {
		return err
	}
	if !taken {
		return errHeld
	}
	work()
	return l.client.Del(ctx, name).Err()
}

func (l plainLocker) close() error { return l.client.Close() }

// floorLocker locks nothing: it makes the two round trips that a lock without any batching
// cannot do without.
type floorLocker struct {
	address string
	idle    chan pinger
}

type pinger struct {
	net.Conn
	answers *bufio.Reader
}

func openFloor(address string) (locker, error) {
	return &floorLocker{address, make(chan pinger, 1024)}, nil
}

func (l *floorLocker) with(ctx context.Context, _ string, work func()) error {
	p, err := l.connection(ctx)
	if err != nil {
		return err
	}
	if err := p.roundTrip(); err != nil {
		return errors.Join(err, p.Close())
	}
	work()
	if err := p.roundTrip(); err != nil {
		return errors.Join(err, p.Close())
	}
	l.idle <- p
	return nil
}

func (l *floorLocker) connection(ctx context.Context) (pinger, error) {
	select {
	case p := <-l.idle:
		return p, nil
	default:
		connection, err := new(net.Dialer).DialContext(ctx, "tcp", l.address)
		if err != nil {
			return pinger{}, err
		}
		return pinger{connection, bufio.NewReaderSize(connection, 64)}, nil
	}
}

var ping = []byte("PING\r\n")

func (p pinger) roundTrip() error {
	if _, err := p.Write(ping); err != nil {
		return err
	}
	answer, err := p.answers.ReadSlice('\n')
	if err == nil && string(answer) != "+PONG\r\n" {
		err = fmt.Errorf("PING is answered with %q", answer)
	}
	return err
}

func (l *floorLocker) close() error {
	close(l.idle)
	var errs []error
	for p := range l.idle {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}
