package lock

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A connection that says nothing for quiet is asked whether it still lives, and given up if it
// does not answer for as long. Without one, a new one is tried every retryListen.
const (
	quiet       = 3 * time.Second
	retryListen = time.Second
)

// messages are the hand-overs that Redis tells this process of: one connection at a time, with one
// subscription, from the first time that somebody waits until the end. The scripts send them; in
// a cluster, where a message of a script would go to every node, whoever hands over does.
type messages struct {
	client  redis.UniversalClient
	cluster *redis.ClusterClient // client, if it is one
	life    time.Duration        // of a connection, after which the client looks for the server anew; 0: no end
	old     atomic.Bool          // the cluster knows no messages that stay in one shard (before Redis 7)
	ctx     context.Context      // ends with close
	stop    context.CancelFunc
	tasks   sync.WaitGroup
}

func newMessages(client redis.UniversalClient) *messages {
	ctx, stop := context.WithCancel(context.Background())
	m := &messages{client: client, ctx: ctx, stop: stop}
	switch client := client.(type) {
	case *redis.ClusterClient:
		m.cluster, m.life = client, client.Options().ConnMaxLifetime
	case *redis.Client:
		m.life = client.Options().ConnMaxLifetime
	}
	return m
}

func (m *messages) close() {
	m.stop()
	m.tasks.Wait()
}

func (m *messages) listen(process Process, listener Listener) {
	m.tasks.Go(func() {
		for m.ctx.Err() == nil {
			err := m.receive(channel(process), listener)
			if m.ctx.Err() != nil {
				return
			}
			if m.tooOld(err) {
				continue
			}
			if err == errTooOld || err == errMoved {
				listener.Listening(false, nil) // what is told until the next one is lost
				continue
			}
			if redis.HasErrorPrefix(err, "MOVED ") {
				m.cluster.ReloadState(m.ctx)
				err = nil
			}
			if _, said := errors.AsType[redis.Error](err); !said && !errors.Is(err, errNoMessages) {
				err = nil // a broken connection: nothing that other operations do not find out
			}
			listener.Listening(false, err)
			select {
			case <-m.ctx.Done():
			case <-time.After(retryListen):
			}
		}
	})
}

func channel(process Process) string { return "redis_lock:" + string(process) }

// tell tells the processes of tokens that the lock was handed over to them, or their place taken,
// where the scripts do not. Nobody waits for that: messages may be lost.
func (m *messages) tell(tokens ...Token) {
	if m.cluster == nil {
		return
	}
	for _, token := range tokens {
		m.tasks.Go(func() {
			ctx, cancel := context.WithTimeout(m.ctx, quiet)
			defer cancel()
			if err := m.publish(ctx, channel(token.process()), string(token)); m.tooOld(err) {
				_ = m.publish(ctx, channel(token.process()), string(token))
			}
		})
	}
}

// tooOld is true if err says that the cluster does not know sharded messages, which was not
// known before.
func (m *messages) tooOld(err error) bool {
	return redis.HasErrorPrefix(err, "unknown command") && m.cluster != nil && m.old.CompareAndSwap(false, true)
}

func (m *messages) publish(ctx context.Context, channel, message string) error {
	if m.cluster != nil && !m.old.Load() {
		return m.cluster.SPublish(ctx, channel, message).Err()
	}
	return m.client.Publish(ctx, channel, message).Err()
}

func (m *messages) subscribe(channel string) *redis.PubSub {
	if m.cluster != nil && !m.old.Load() {
		return m.cluster.SSubscribe(m.ctx, channel)
	}
	return m.client.Subscribe(m.ctx, channel)
}

var (
	errNoMessages = errors.New("redis took the subscription, but no message arrives")
	errTooOld     = errors.New("the subscription has lived long enough")
	errMoved      = errors.New("redis ended the subscription: another node of the cluster has its slot now")
)

// receive passes messages on until the connection breaks, or is too old: the name of the server
// may lead to another one by now. That they arrive is known when a message of our own has: that a
// server, or a proxy, took the subscription is not enough.
func (m *messages) receive(channel string, listener Listener) error {
	subscription := m.subscribe(channel)
	defer subscription.Close()
	defer context.AfterFunc(m.ctx, func() { subscription.Close() })() // receiving does not look at it
	subscribed, arrive, asked := false, false, false
	begin := time.Now()
	for {
		if arrive && m.life > 0 && time.Since(begin) > m.life {
			return errTooOld
		}
		message, err := subscription.ReceiveTimeout(m.ctx, quiet)
		timeout, ok := errors.AsType[net.Error](err)
		switch quiet := ok && timeout.Timeout(); {
		case quiet && subscribed && !arrive:
			return errNoMessages
		case quiet && arrive && !asked:
			asked = true
			err = subscription.Ping(m.ctx)
		}
		if err != nil {
			return err
		}
		switch message := message.(type) {
		case *redis.Subscription:
			if message.Count == 0 {
				return errMoved
			}
			subscribed = true
			if err := m.publish(m.ctx, channel, ""); err != nil {
				return err
			}
		case *redis.Pong:
			asked = false
		case *redis.Message:
			if message.Payload != "" {
				listener.Handed(Token(message.Payload))
			} else if !arrive {
				arrive = true
				listener.Listening(true, nil)
			}
		}
	}
}
