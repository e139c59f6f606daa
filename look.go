package redislock

import (
	"bufio"
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"
)

// lookAgain is the pause before a Redis that did not answer is looked at again.
const lookAgain = 2 * time.Second

// look says once, as soon as Redis answers, which one it is, and what about it endangers locks. It
// returns when it has, or when ctx ends. A user who may not use INFO learns nothing.
func look(ctx context.Context, client redis.UniversalClient, log *zap.Logger) {
	for {
		servers, err := infos(ctx, client)
		if _, refused := errors.AsType[redis.Error](err); refused {
			log.Debug("redis does not say which one it is", zap.Error(err))
			return
		}
		if err == nil {
			for _, server := range servers {
				server.tell(log)
			}
			return
		}
		select {
		case <-time.After(lookAgain):
		case <-ctx.Done():
			return
		}
	}
}

// A serverInfo is what a server says about itself: the fields of INFO.
type serverInfo map[string]string

// infos asks the server, or all masters of a cluster.
func infos(ctx context.Context, client redis.UniversalClient) ([]serverInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, lookAgain)
	defer cancel()
	var mu sync.Mutex
	var all []serverInfo
	ask := func(ctx context.Context, server *redis.Client) error {
		text, err := server.Info(ctx).Result()
		if err != nil {
			return err
		}
		info := serverInfo{"address": server.Options().Addr}
		for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
			if name, value, found := strings.Cut(lines.Text(), ":"); found {
				info[name] = value
			}
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, info)
		return nil
	}
	var err error
	switch client := client.(type) {
	case *redis.ClusterClient:
		err = client.ForEachMaster(ctx, ask)
	case *redis.Client:
		err = ask(ctx, client)
	}
	return all, err
}

func (s serverInfo) tell(log *zap.Logger) {
	log = log.With(zap.String("server", s["address"]))
	name, version := "redis", s["redis_version"]
	if s["server_name"] != "" { // Valkey, which gives a compatible Redis's version beside its own
		name, version = s["server_name"], s[s["server_name"]+"_version"]
	}
	log.Info("redis answers", zap.String("name", name), zap.String("version", version), zap.String("role", s["role"]))
	if s["role"] == "slave" {
		log.Error("redis is a replica, which cannot take locks: give the address of its master, or write redis " + sentinelMode)
	}
	if s["maxmemory"] != "0" && s["maxmemory_policy"] != "noeviction" {
		log.Warn("redis may evict locks when its memory is full: set maxmemory-policy to noeviction, or give locks a Redis of their own",
			zap.String("maxmemory-policy", s["maxmemory_policy"]), zap.String("maxmemory", s["maxmemory_human"]))
	}
}
