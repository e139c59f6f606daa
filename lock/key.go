package lock

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

const (
	maxName    = 200 // bytes of an encoded name that are kept as they are
	hashedHead = 100 // bytes of a longer one that stay readable
)

// Key returns the key under which the lock with this name is stored.
//
// The name is encoded so that any bytes make a key and no two names make the same
// one: percent signs, braces (Redis Cluster reads them as hash tags) and ASCII control
// characters are percent-encoded. A result of more than 200 bytes becomes its first 100
// bytes, a tilde, and the SHA-256 of the whole in hex; a shorter one that looks like
// such a result is hashed as well, so that nobody can choose a name that collides.
//
// The encoding never changes: all versions that share a Redis must agree on it.
func Key(prefix, name string) string {
	name = percentEncode(name)
	if len(name) > maxName || looksHashed(name) {
		sum := sha256.Sum256([]byte(name))
		name = name[:hashedHead] + "~" + hex.EncodeToString(sum[:])
	}
	return prefix + name
}

func percentEncode(name string) string {
	const upperhex = "0123456789ABCDEF"
	var b strings.Builder
	plain := 0 // name[plain:i] needs no encoding
	for i := range len(name) {
		if c := name[i]; special(c) {
			b.WriteString(name[plain:i])
			b.Write([]byte{'%', upperhex[c>>4], upperhex[c&15]})
			plain = i + 1
		}
	}
	if plain == 0 {
		return name
	}
	b.WriteString(name[plain:])
	return b.String()
}

func special(c byte) bool {
	return c == '%' || c == '{' || c == '}' || c < 0x20 || c == 0x7f
}

func looksHashed(name string) bool {
	if len(name) != hashedHead+1+2*sha256.Size || name[hashedHead] != '~' {
		return false
	}
	for _, c := range []byte(name[hashedHead+1:]) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
