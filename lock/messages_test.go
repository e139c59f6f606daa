package lock

import (
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
)

// Another node of the cluster gets the slot of a process's channel: messages arrive again from
// there, and it is known when.
func TestChannelMoves(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: append([]string(nil), cluster.Addrs...), MaxRetries: -1, ContextTimeoutEnabled: true})
	m := newMessages(client)
	defer client.Close()
	defer m.close()
	process := NewProcess()
	listening, handed := make(chan bool, 100), make(chan Token, 100)
	m.listen(process, Listener{Handed: func(t Token) { handed <- t }, Listening: func(on bool, _ error) { listening <- on }})
	if !<-listening {
		t.Fatal("no messages arrive")
	}
	to := cluster.Servers[0]
	if to == cluster.MasterOf(t, channel(process)) {
		to = cluster.Servers[1]
	}
	cluster.MoveSlot(t, cluster.Slot(t, channel(process)), to, func() {})
	if <-listening {
		t.Error("nobody said that no messages arrive")
	}
	for !<-listening { // until it has found the node
	}
	token := process.NewToken()
	m.tell(token)
	if got := <-handed; got != token {
		t.Errorf("heard of %v, want %v", got, token)
	}
}
