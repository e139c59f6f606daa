package lock_test

import (
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-redis-lock/caddy-redis-lock/internal/redistest"
	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

// The commands that docs/protocol.md lists for each operation, but for TIME, which the tests use
// themselves.
func TestDocumentedCost(t *testing.T) {
	t.Parallel()
	document, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, protocol := range []struct {
		section string
		open    func(redis.UniversalClient) lock.Store
		expired func(*redis.Client) // leaves what a holder does that died
	}{
		{"What it costs", lock.NewGetSet, func(c *redis.Client) { c.Set(t.Context(), mainKey, 1, 0) }},
		{"The protocol `token`", lock.NewToken, func(c *redis.Client) { c.HSet(t.Context(), holderKey, "t", "dead", "e", 1) }},
	} {
		t.Run(protocol.section, func(t *testing.T) {
			t.Parallel()
			_, rows, _ := strings.Cut(string(document), "\n## "+protocol.section+"\n")
			rows, _, _ = strings.Cut(rows, "\n## ")
			checkCost(t, rows, protocol.open, protocol.expired)
		})
	}
}

func checkCost(t *testing.T, rows string, newStore func(redis.UniversalClient) lock.Store, expired func(*redis.Client)) {
	server := redistest.Start(t)
	store := open(t, server, newStore)
	process := lock.NewProcess()
	newClaim := func(p lock.Process) lock.Claim { return lock.Claim{Token: p.NewToken(), Lease: time.Hour, Wait: true} }
	holder, near, far := newClaim(process), newClaim(process), newClaim(lock.NewProcess())
	delivery, old, newest := newClaim(process), newClaim(process), newClaim(process)
	delivery.Token, delivery.Done = delivery.Token.Handling("72d3162e"), time.Hour
	old.Token, newest.Token = old.Token.Superseding(), newest.Token.Superseding()
	try := func(key string, c lock.Claim) {
		_, err := store.Acquire(t.Context(), key, c)
		if held, ok := errors.AsType[*lock.HeldError](err); err != nil && !ok && !errors.Is(err, lock.ErrDone) {
			t.Error(err)
		} else if ok && c.Token == near.Token {
			near.Place = held.Place
		}
	}
	free := func(key string, c lock.Claim) {
		c.Wait = false
		if _, err := store.Release(t.Context(), key, c); err != nil {
			t.Error(err)
		}
	}
	warmUp := func() { // the first use of a script says EVAL
		token := newToken()
		try("warm", lock.Claim{Token: token, Lease: time.Second})
		if _, err := store.Renew(t.Context(), "warm", lock.Claim{Token: token, Lease: time.Second}); err != nil {
			t.Error(err)
		}
		free("warm", lock.Claim{Token: token, Lease: time.Second})
	}
	warmUp()
	for _, step := range []struct {
		operation string
		do        func()
	}{
		{"acquire, free", func() { try(mainKey, holder) }},
		{"acquire, held", func() { try(mainKey, lock.Claim{Token: newToken(), Lease: time.Second}) }},
		{"renew", func() { _, _ = store.Renew(t.Context(), mainKey, holder) }},
		{"acquire, held, the first to take a place", func() { try(mainKey, near) }},
		{"asking again in line", func() { try(mainKey, near) }},
		{"", func() { try(mainKey, far) }},
		{"release, hand-over inside a process", func() { free(mainKey, holder) }},
		{"release, hand-over to another process", func() { free(mainKey, near) }},
		{"asking after a hand-over", func() { try(mainKey, far) }},
		{"", func() { free(mainKey, far) }},
		{"", func() { try(mainKey, holder) }},
		{"release", func() { free(mainKey, holder) }},
		{"", func() { expired(server.Client) }},
		{"acquire, expired", func() { try(mainKey, holder) }},
		{"", func() { free(mainKey, holder) }},
		{"acquire, free, for a delivery", func() { try(mainKey, delivery) }},
		{"release, delivery handled", func() { free(mainKey, delivery) }},
		{"acquire, for a delivery that was handled", func() { try(mainKey, delivery) }},
		{"", func() { try(mainKey, holder) }},
		{"", func() { try(mainKey, old) }},
		{"taking the place of another", func() { try(mainKey, newest) }},
	} {
		before := server.Commands(t)
		step.do()
		if step.operation == "" {
			continue
		}
		var ran []string
		for command, n := range server.Commands(t) {
			if command != "evalsha" {
				ran = append(ran, slices.Repeat([]string{strings.ToUpper(command)}, n-before[command])...)
			}
		}
		row := regexp.MustCompile(`(?m)^\| ` + step.operation + ` \| ([A-Z ]+) \|$`).FindStringSubmatch(rows)
		if row == nil {
			t.Errorf("docs/protocol.md does not say what %q costs", step.operation)
			continue
		}
		want := slices.DeleteFunc(strings.Fields(row[1]), func(command string) bool { return command == "TIME" })
		slices.Sort(want)
		slices.Sort(ran)
		if !slices.Equal(ran, want) {
			t.Errorf("%s: ran %v, documented %v", step.operation, ran, want)
		}
	}
}
