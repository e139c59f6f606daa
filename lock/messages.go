package lock

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A connection that says nothing for quiet is asked whether it still lives, and given up if it
// does not answer for as long. Without one, a new one is tried every retryListen.
const (
	quiet       = 3 * time.Second
	retryListen = time.Second
)

// messages are the hand-overs that Redis tells this process of: one connection, with one
// subscription, from the first time that somebody waits until the end.
type messages struct {
	client redis.UniversalClient
	ctx    context.Context // ends with close
	stop   context.CancelFunc
	tasks  sync.WaitGroup
}

func newMessages(client redis.UniversalClient) messages {
	ctx, stop := context.WithCancel(context.Background())
	return messages{client: client, ctx: ctx, stop: stop}
}

func (m *messages) close() {
	m.stop()
	m.tasks.Wait()
}

func (m *messages) listen(process Process, listener Listener) {
	m.tasks.Go(func() {
		for m.ctx.Err() == nil {
			err := m.receive("redis_lock:"+string(process), listener)
			if m.ctx.Err() != nil {
				return
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

var errNoMessages = errors.New("redis took the subscription, but no message arrives")

// receive passes messages on until the connection breaks. That they arrive is known when a
// message of our own has: that a server, or a proxy, took the subscription is not enough.
func (m *messages) receive(channel string, listener Listener) error {
	subscription := m.client.Subscribe(m.ctx, channel)
	defer subscription.Close()
	defer context.AfterFunc(m.ctx, func() { subscription.Close() })() // receiving does not look at it
	subscribed, arrive, asked := false, false, false
	for {
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
			subscribed = true
			if err := m.client.Publish(m.ctx, channel, "").Err(); err != nil {
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
