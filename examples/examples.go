// Package examples has the Caddyfiles of the documentation, for the demo and the tests, so
// that what a reader copies is what runs there.
package examples

import _ "embed"

// Quickstart is quickstart.caddy: webhooks, one at a time for each path.
//
//go:embed quickstart.caddy
var Quickstart string
