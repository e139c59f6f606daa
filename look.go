package redislock

import (
	"bufio"
	"context"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"
)

// The pause before a Redis that did not answer is looked at again: minLook at first, doubled each time up
// to maxLook.
const (
	minLook = time.Second
	maxLook = time.Minute
)

// look says once, as soon as Redis answers, which one it is, and what about it endangers locks; and
// once, too, that it does not answer: otherwise it would be a request that finds out. It returns
// when it has said what it is, or when ctx ends. A user who may not use INFO learns nothing.
func look(ctx context.Context, client redis.UniversalClient, log *zap.Logger) {
	for pause := minLook; ; pause = min(2*pause, maxLook) {
		servers, err := infos(ctx, client)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			for _, server := range servers {
				server.tell(log)
			}
			return
		case redis.HasErrorPrefix(err, "NOPERM"):
			log.Debug("redis does not say which one it is", zap.Error(err))
			return
		case pause == minLook:
			log.Warn("redis does not answer yet", zap.Error(err), zap.String("remedy", remedy(err)))
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// A serverInfo is what a server says about itself: the fields of INFO.
type serverInfo map[string]string

// infos asks the server, or all masters of a cluster.
func infos(ctx context.Context, client redis.UniversalClient) ([]serverInfo, error) {
	var mu sync.Mutex
	var all []serverInfo
	ask := func(ctx context.Context, server *redis.Client, address string) error {
		text, err := server.Info(ctx).Result()
		if err != nil {
			return err
		}
		info := make(serverInfo)
		for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
			if name, value, found := strings.Cut(lines.Text(), ":"); found {
				info[name] = value
			}
		}
		info["address"] = address
		mu.Lock()
		defer mu.Unlock()
		all = append(all, info)
		return nil
	}
	var err error
	switch client := client.(type) {
	case *redis.ClusterClient:
		err = client.ForEachMaster(ctx, func(ctx context.Context, server *redis.Client) error {
			return ask(ctx, server, server.Options().Addr)
		})
	case *redis.Client:
		err = ask(ctx, client, "")
	}
	return all, err
}

func (s serverInfo) tell(log *zap.Logger) {
	if s["address"] != "" {
		log = log.With(zap.String("server", s["address"]))
	}
	name, version := "redis", s["redis_version"]
	if s["server_name"] != "" { // Valkey, which gives a compatible Redis's version beside its own
		name, version = s["server_name"], s[s["server_name"]+"_version"]
	}
	log.Info("redis answers", zap.String("name", name), zap.String("version", version), zap.String("role", s["role"]))
	if s["role"] == "slave" {
		log.Error("redis is a replica, which cannot take locks: give the address of its master, or write redis " + sentinelMode)
	}
	limit, policy := s["maxmemory"], s["maxmemory_policy"]
	if limit != "" && limit != "0" && policy != "" && policy != "noeviction" {
		log.Warn("redis may evict locks when its memory is full: set its maxmemory-policy to noeviction, or give the locks a Redis of their own",
			zap.String("maxmemory-policy", policy), zap.String("maxmemory", s["maxmemory_human"]))
	}
}
