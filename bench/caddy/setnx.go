package main

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

func init() {
	caddy.RegisterModule(setNX{})
	httpcaddyfile.RegisterHandlerDirective("bench_setnx", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		handler := new(setNX)
		h.Next()
		if !h.Args(&handler.Name, &handler.Address) {
			return nil, h.ArgErr()
		}
		return handler, nil
	})
}

// setNX is the least that a lock in Redis can cost: SETNX before the next handler, DEL after
// it. It renews nothing and deletes whatever is there, so it is of no use but to compare with.
//
//	bench_setnx <name> <address>
type setNX struct {
	Name    string `json:"name"`
	Address string `json:"address"`

	client *redis.Client
}

func (setNX) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.bench_setnx",
		New: func() caddy.Module { return new(setNX) },
	}
}

func (s *setNX) Provision(caddy.Context) error {
	s.client = redis.NewClient(&redis.Options{
		Addr:                     s.Address,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	return nil
}

func (s *setNX) Cleanup() error { return s.client.Close() }

func (s *setNX) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	replacer := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	key := "setnx." + replacer.ReplaceAll(s.Name, "")
	taken, err := s.client.SetNX(r.Context(), key, 1, 30*time.Second).Result()
	if err != nil {
		return caddyhttp.Error(http.StatusServiceUnavailable, err)
	}
	if !taken {
		return caddyhttp.Error(http.StatusLocked, errors.New("held"))
	}
	defer s.client.Del(context.WithoutCancel(r.Context()), key)
	return next.ServeHTTP(w, r)
}

// Interface guards
var (
	_ caddy.Provisioner           = (*setNX)(nil)
	_ caddy.CleanerUpper          = (*setNX)(nil)
	_ caddyhttp.MiddlewareHandler = (*setNX)(nil)
)
