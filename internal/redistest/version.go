package redistest

import (
	"fmt"
	"os/exec"
	"regexp"
	"sync"
	"testing"
)

// Since skips a test on a server that does not have what the test is about, so that the others
// can be run on all versions that the module works with.
func Since(t testing.TB, version, what string) {
	t.Helper()
	if !atLeast(t, version) {
		t.Skipf("this redis-server, older than %s, does not have %s", version, what)
	}
}

func atLeast(t testing.TB, version string) bool {
	t.Helper()
	found, err := serverVersion()
	if err != nil {
		t.Fatal(err)
	}
	return number(found) >= number(version)
}

// serverVersion returns major.minor of Redis, or of Valkey, whose numbers go on from Redis 7.2.
var serverVersion = sync.OnceValues(func() (string, error) {
	output, err := exec.Command("redis-server", "--version").Output()
	if err != nil {
		return "", err
	}
	version := regexp.MustCompile(` v=(\d+\.\d+)`).FindSubmatch(output)
	if version == nil {
		return "", fmt.Errorf("redis-server --version: %q", output)
	}
	return string(version[1]), nil
})

func number(version string) int {
	var major, minor int
	_, _ = fmt.Sscanf(version, "%d.%d", &major, &minor)
	return major*1000 + minor
}
