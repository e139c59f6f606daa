// Command caddy is a Caddy with the redis_lock module in it: for trying it out, and for the
// tests. Build your own with xcaddy.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddy-redis-lock/caddy-redis-lock"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

func main() {
	caddycmd.Main()
}
