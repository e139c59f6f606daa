package lock

import (
	"context"
	"crypto/rand"
	"time"
)

// A Store is a place where locks live, and the protocol they follow there. Every
// method is one atomic step, judged by the Store's own clock. Stores know keys (see
// [Key]) and tokens; names, waiting and handles are the [Locker]'s business.
//
// All methods are safe for concurrent use and return at the latest when the deadline of ctx
// passes. Their
// errors are a [*HeldError], a [*LostError] or an [*UnavailableError]. The conformance
// suite in package locktest says in detail what a Store must do.
type Store interface {
	// Acquire gives key to token for lease (whole seconds, at least one) if it is free,
	// or if the lease of its holder has passed. Asked again with the token that holds
	// the key, it repeats its answer: a caller whose reply got lost may ask again.
	Acquire(ctx context.Context, key string, token Token, lease time.Duration) (Grant, error)

	// Renew moves the end of the lock that token holds to a lease from now; it never
	// comes earlier by that. Refused, it changes nothing: the holder must stop, then
	// call Release.
	Renew(ctx context.Context, key string, token Token, lease time.Duration) (Grant, error)

	// Release frees key if it is still, unexpired, the lock that token holds. Otherwise
	// it returns a *LostError, and whoever holds key by now keeps it.
	Release(ctx context.Context, key string, token Token) error

	// Inspect returns nil if Acquire would succeed, and its error otherwise.
	Inspect(ctx context.Context, key string) error

	// ForceRelease frees key whoever holds it. A holder that still runs learns of it by
	// its next Renew or Release: this breaks the mutual exclusion.
	ForceRelease(ctx context.Context, key string) error

	// Close gives up connections and memory. No other call may follow.
	Close() error
}

// A Token tells one acquisition from all others. It is never used twice.
type Token string

// NewToken returns a random token (130 bits).
func NewToken() Token { return Token(rand.Text()) }

// A Grant is a Store's yes.
type Grant struct {
	// Fence is larger than that of every earlier grant of the same key to another
	// token. An upstream that refuses a fence below the highest it has seen is safe
	// even where the lock cannot be (see the README).
	Fence int64

	// TTL is how long the lock lasts, counted from some moment between asking and
	// being answered: a holder must count from before it asked.
	TTL time.Duration
}
