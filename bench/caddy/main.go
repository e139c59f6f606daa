// Command caddy is the Caddy that the benchmark measures: all contenders are this one binary, and
// differ only in the directive of their site.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddy-redis-lock/caddy-redis-lock"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

func main() {
	caddycmd.Main()
}
