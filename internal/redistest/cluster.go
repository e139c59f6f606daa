package redistest

import (
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

const slots = 16384

// A Cluster is a Redis Cluster of three masters with one replica each.
type Cluster struct {
	Addrs   []string
	Servers []*Server // in the order of Addrs; the first three begin as the masters
}

// StartCluster starts a cluster on whose state all of its nodes agree. The arguments are for each
// node. A node that is killed and restarted is the same node, without its data.
func StartCluster(t testing.TB, args ...string) *Cluster {
	t.Helper()
	c := &Cluster{}
	for range 6 {
		addr := freeClusterAddr(t)
		c.Addrs = append(c.Addrs, addr)
		c.Servers = append(c.Servers, launch(t, &redis.Options{Addr: addr}, plain(addr, append([]string{
			"--cluster-enabled", "yes", "--cluster-config-file", filepath.Join(t.TempDir(), "nodes.conf"),
			"--cluster-node-timeout", "1500", "--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0",
		}, args...))...))
	}
	for i, server := range c.Servers {
		if i < 3 {
			result(t, server.Client.ClusterAddSlotsRange(t.Context(), i*slots/3, (i+1)*slots/3-1))
		}
		// They would settle on different ones by themselves, which takes some time.
		result(t, server.Client.Do(t.Context(), "cluster", "set-config-epoch", i+1))
		for _, other := range c.Addrs[:i] {
			result(t, server.Client.ClusterMeet(t.Context(), "127.0.0.1", port(other)))
		}
	}
	c.awaitAgreement(t, "the nodes to meet", func(v view) bool { return len(v) == 6 })
	for i, master := range c.Servers[:3] {
		result(t, c.Servers[i+3].Client.ClusterReplicate(t.Context(), id(t, master)))
	}
	c.awaitAgreement(t, "the replicas to be in sync", func(v view) bool {
		for i, master := range c.Servers[:3] {
			if v[c.Addrs[i+3]].master != master.Addr || replicasInSync(t, master) != 1 {
				return false
			}
		}
		return c.serves(t)
	})
	return c
}

// freeClusterAddr is a FreeAddr whose port has a free one 10000 above it, where the node will
// talk to the others.
func freeClusterAddr(t testing.TB) string {
	t.Helper()
	for {
		addr := FreeAddr(t)
		number, err := strconv.Atoi(port(addr))
		if err != nil {
			t.Fatal(err)
		}
		if number >= 22_000 { // the other one would not be below the systems' range
			continue
		}
		bus := fmt.Sprintf("127.0.0.1:%d", number+10_000)
		if _, taken := takenAddrs.LoadOrStore(bus, true); taken {
			continue
		}
		if ln, err := net.Listen("tcp", bus); err == nil {
			ln.Close()
			return addr
		}
	}
}

// Slot returns the slot that a key is in.
func (c *Cluster) Slot(t testing.TB, key string) int {
	t.Helper()
	return int(result(t, c.running()[0].Client.ClusterKeySlot(t.Context(), key)))
}

// MasterOf returns the node that serves a key.
func (c *Cluster) MasterOf(t testing.TB, key string) *Server {
	t.Helper()
	return c.owner(t, c.Slot(t, key))
}

func (c *Cluster) owner(t testing.TB, slot int) *Server {
	t.Helper()
	for addr, node := range look(t, c.running()[0]) {
		if node.serves(slot) {
			return at(t, c.Servers, addr)
		}
	}
	t.Fatalf("nobody serves slot %d", slot)
	return nil
}

// Partner returns the replica of a master, or the master of a replica.
func (c *Cluster) Partner(server *Server) *Server {
	return c.Servers[(slices.Index(c.Servers, server)+3)%6]
}

// MoveSlot has another master serve a slot, as when a cluster is resharded. halfway runs while the
// slot is open on both sides and the first half of its keys, in the order of their names, has
// been moved: of a single key, that one.
func (c *Cluster) MoveSlot(t testing.TB, slot int, to *Server, halfway func()) {
	t.Helper()
	from := c.owner(t, slot)
	result(t, to.Client.Do(t.Context(), "cluster", "setslot", slot, "importing", id(t, from)))
	result(t, from.Client.Do(t.Context(), "cluster", "setslot", slot, "migrating", id(t, to)))
	keys := keysIn(t, from, slot)
	migrate(t, from, to, keys[:(len(keys)+1)/2])
	halfway()
	for keys = keysIn(t, from, slot); len(keys) > 0; keys = keysIn(t, from, slot) {
		migrate(t, from, to, keys)
	}
	for _, server := range []*Server{to, from} {
		result(t, server.Client.Do(t.Context(), "cluster", "setslot", slot, "node", id(t, to)))
	}
	c.awaitAgreement(t, "all nodes to know that the slot has moved", func(v view) bool {
		return v[to.Addr].serves(slot) && c.serves(t)
	})
}

func keysIn(t testing.TB, server *Server, slot int) []string {
	t.Helper()
	keys := result(t, server.Client.ClusterGetKeysInSlot(t.Context(), slot, 1000))
	slices.Sort(keys)
	return keys
}

func migrate(t testing.TB, from, to *Server, keys []string) {
	t.Helper()
	if len(keys) == 0 {
		return
	}
	command := []any{"migrate", "127.0.0.1", port(to.Addr), "", 0, 5000, "keys"}
	for _, key := range keys {
		command = append(command, key)
	}
	result(t, from.Client.Do(t.Context(), command...))
}

// Failover has a living master's replica take its place, without a loss, and returns it.
func (c *Cluster) Failover(t testing.TB, old *Server) *Server {
	t.Helper()
	result(t, c.Partner(old).Client.ClusterFailover(t.Context()))
	return c.AwaitFailover(t, old)
}

// AwaitFailover waits until the replica serves what old did, which the test has killed or paused,
// and all nodes that run agree. If old runs, it has become a replica in sync. It returns the one
// that serves.
func (c *Cluster) AwaitFailover(t testing.TB, old *Server) *Server {
	t.Helper()
	replica := c.Partner(old)
	c.awaitAgreement(t, "the replica to be promoted", func(v view) bool {
		return v[replica.Addr].slots != "" && c.serves(t) && (!old.running() || replicasInSync(t, replica) == 1)
	})
	return replica
}

// running are the nodes that can be asked.
func (c *Cluster) running() (servers []*Server) {
	for _, server := range c.Servers {
		if server.running() {
			servers = append(servers, server)
		}
	}
	return servers
}

// serves is true if all nodes that run say that the cluster is fine.
func (c *Cluster) serves(t testing.TB) bool {
	t.Helper()
	for _, server := range c.running() {
		if !strings.Contains(result(t, server.Client.ClusterInfo(t.Context())), "cluster_state:ok") {
			return false
		}
	}
	return true
}

// awaitAgreement waits until all nodes that run see the same, and that is as wanted.
func (c *Cluster) awaitAgreement(t testing.TB, what string, wanted func(view) bool) {
	t.Helper()
	await(t, what, func() bool {
		servers := c.running()
		first := look(t, servers[0])
		for _, server := range servers[1:] {
			if !maps.Equal(look(t, server), first) {
				return false
			}
		}
		return wanted(first)
	})
}

// A view is what a node knows of all of them, by their addresses.
type view map[string]node

type node struct {
	id, master string // master: address; empty for one that is itself a master
	slots      string // first-last, separated by spaces
}

func (n node) serves(slot int) bool {
	for part := range strings.FieldsSeq(n.slots) {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, _ := strconv.Atoi(first)
		to, _ := strconv.Atoi(last)
		if from <= slot && slot <= to {
			return true
		}
	}
	return false
}

// look asks a node for its view, without the nodes that it has not been answered by yet.
func look(t testing.TB, server *Server) view {
	t.Helper()
	v, addrs := make(view), make(map[string]string)
	lines := strings.Split(strings.TrimSpace(result(t, server.Client.ClusterNodes(t.Context()))), "\n")
	for _, line := range lines {
		// id address@bus flags master ping pong epoch link slots...
		fields := strings.Fields(line)
		addr, _, _ := strings.Cut(fields[1], "@")
		if strings.Contains(fields[2], "handshake") {
			continue
		}
		addrs[fields[0]] = addr
		n := node{id: fields[0], master: fields[3]}
		for _, part := range fields[8:] {
			if !strings.HasPrefix(part, "[") { // a slot that is being moved
				n.slots += part + " "
			}
		}
		v[addr] = n
	}
	for addr, n := range v {
		n.master = addrs[n.master]
		v[addr] = n
	}
	return v
}

func id(t testing.TB, server *Server) string {
	t.Helper()
	return result(t, server.Client.Do(t.Context(), "cluster", "myid")).(string)
}
