package lock

import (
	"strings"
	"testing"
)

// The keys are part of the interface: every version that shares a Redis must make the same.
func TestKeysAreFinal(t *testing.T) {
	long := strings.Repeat("x", 201)
	hashed := strings.Repeat("x", 100) + "~" + "3e77e8a6e2a2e4b4d7d4c1bd9a1bcd0b0ab6d4ba6d1d7e5b9c1b2a8d6a5f4e3d"
	for _, c := range []struct{ name, key string }{
		{"", "lock."},
		{"foo", "lock.foo"},
		{"shop.example/hooks/1", "lock.shop.example/hooks/1"},
		{"two words", "lock.two words"},
		{"ünïcödé", "lock.ünïcödé"},
		{"100%", "lock.100%25"},
		{"%25", "lock.%2525"},
		{"{a}", "lock.%7Ba%7D"},
		{"a\x00\n\x1f\x7fb", "lock.a%00%0A%1F%7Fb"},
		{"\xff", "lock.\xff"},
		{"~", "lock.~"},
		{strings.Repeat("x", 200), "lock." + strings.Repeat("x", 200)},
		{long, "lock." + strings.Repeat("x", 100) + "~84a0678c90937f5dcf9994d5866668da6b995109c8ad845410559b48a4ecafed"},
		{strings.Repeat("%", 67), "lock." + strings.Repeat("%25", 33) + "%~81d0057a8b0979fb9a75f9483717c6e3d0ea30723eaab69e4a3ec406cec847a9"}, // 201 bytes once encoded
		{hashed, "lock." + strings.Repeat("x", 100) + "~a6c8a057d9bb2316b50f608129f1d247968d019f7b0dcaf465dd9802e1471d9b"},                    // nobody can choose a name that looks like a hash
	} {
		if key := Key("lock.", c.name); key != c.key {
			t.Errorf("key of %q is\n%q, want\n%q", c.name, key, c.key)
		}
	}
	// Same shape, but for its last character: kept.
	if name := hashed[:164] + "g"; Key("p", name) != "p"+name {
		t.Errorf("%q was hashed", name)
	}
}

func FuzzKey(f *testing.F) {
	for _, name := range []string{"", "foo", "%{}", strings.Repeat("é", 150), strings.Repeat("x", 100) + "~" + strings.Repeat("0", 64)} {
		f.Add(name, name+"x")
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		key := Key("lock.", a)
		if len(key) > len("lock.")+maxName {
			t.Errorf("key of %d bytes", len(key))
		}
		if strings.ContainsFunc(key, func(c rune) bool { return c < 0x20 || c == 0x7f || c == '{' || c == '}' }) {
			t.Errorf("key %q has characters that must be encoded", key)
		}
		if other := Key("lock.", b); (a == b) != (key == other) {
			t.Errorf("names %q and %q, keys %q and %q", a, b, key, other)
		}
	})
}
