package lock

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"
)

// A Store is a place where locks live, each with the line of those who wait for it, and the
// protocol they follow there. Every method is one atomic step, judged by the Store's own clock.
// Stores know keys (see [Key]) and tokens; names, patience and handles are the [Locker]'s
// business.
//
// All methods are safe for concurrent use and return at the latest when the deadline of ctx
// passes. Their errors are a [*HeldError], a [*LostError] or an [*UnavailableError], and for claims
// whose token says more [ErrDone] and [ErrSuperseded]: see [Token]. The conformance suite in package
// locktest says in detail what a Store must do.
type Store interface {
	// Acquire gives key to the claim if it is free, or if the lease of its holder has passed,
	// and if nobody stands in line before the claim; a free key with a line goes to the first
	// in it by that. Asked again with the token that holds the key, it repeats its answer: a
	// caller whose reply got lost may ask again. A claim to which the key was handed over is
	// confirmed by that, for its whole lease.
	//
	// A process that has claims in line must ask for one of them every [Heartbeat], or all of
	// them lose their places.
	//
	// It returns [ErrDone] for a claim whose delivery was handled, and [ErrSuperseded] for one whose
	// place a newer one has taken. A claim that was in line, or to which key was handed over, calls
	// Release then.
	Acquire(ctx context.Context, key string, claim Claim) (Grant, error)

	// Renew moves the end of the lock that the claim holds to a lease from now; it never
	// comes earlier by that. Refused, it changes nothing: the holder must stop, then
	// call Release.
	Renew(ctx context.Context, key string, claim Claim) (Grant, error)

	// Release frees key, or hands it over to the first in line, if it is still, unexpired, the
	// lock that the claim holds. Otherwise it returns a *LostError, and whoever holds key by now
	// keeps it. A claim in line leaves it in either case, and the claim's Done is noted.
	Release(ctx context.Context, key string, claim Claim) (Successor, error)

	// Inspect returns nil if Acquire would succeed for a new claim with this token, and its error
	// otherwise.
	Inspect(ctx context.Context, key string, token Token) error

	// ForceRelease frees key whoever holds it. A holder that still runs learns of it by
	// its next Renew or Release: this breaks the mutual exclusion.
	ForceRelease(ctx context.Context, key string) error

	// Shard names the part of the Store that key lives in, as far as is known without asking:
	// parts are unavailable each on its own. It is empty if there is one.
	Shard(key string) string

	// Listen has the Store call the Listener until Close: it is what a process does that has
	// claims in line. Without it hand-overs are found out by asking.
	Listen(process Process, listener Listener)

	// Close gives up connections and memory. No other call may follow.
	Close() error
}

// Heartbeat is how often a process asks at least, see [Store].
const Heartbeat = 700 * time.Millisecond

// A Claim is what one caller wants of a key.
type Claim struct {
	Token Token

	// Lease is how long the lock lasts without a renewal: whole seconds, at least one.
	Lease time.Duration

	// Wait gives a claim that is refused a place in line, behind those that came before.
	Wait bool

	// LineUp takes the place only, and never the lock: for callers whose own process holds it.
	LineUp bool

	// Place is what a *HeldError said about an earlier refusal. A place that the Store has
	// lost is taken again by that.
	Place int64

	// Since is when a claim came that supersedes others: by that they are told older from newer, in
	// whatever order they ask. Zero: now.
	Since time.Time

	// Done, in a Release, is for how long the token's delivery counts as handled from now on: to the
	// millisecond. Zero: it may be tried again.
	Done time.Duration
}

// A Process tells those apart that share a Store. Its tokens begin with it.
type Process string

// NewProcess returns a random process (50 bits).
func NewProcess() Process { return Process(rand.Text()[:10]) }

// A Token tells one acquisition from all others. It is never used twice. Others meet it in the
// Store, as the holder's or in line, so it has what they must know of its claim:
// process.random[.delivery][!]. See [Token.Handling] and [Token.Superseding].
type Token string

// NewToken returns a random token (130 bits) of the process.
func (p Process) NewToken() Token { return Token(string(p) + "." + rand.Text()) }

// Handling returns the token for a claim that handles the delivery called id, any string. It is
// refused with [ErrDone] while a Done of another claim of the same key and delivery lasts, and with
// [SameDelivery] while another one holds the key.
func (t Token) Handling(id string) Token {
	sum := sha256.Sum256([]byte(id))
	return t + Token("."+hex.EncodeToString(sum[:len(sum)/2]))
}

// Superseding returns the token for a claim that takes the place of all others of its kind that came
// before it and wait: they are refused with [ErrSuperseded] from then on. For a delivery that is handled
// just now it does not do that: what is sent again is older than what waits.
func (t Token) Superseding() Token { return t + superseding }

const superseding = "!"

// process returns whose token it is.
func (t Token) process() Process {
	process, _, _ := strings.Cut(string(t), ".")
	return Process(process)
}

// delivery returns what Handling has added; empty: nothing.
func (t Token) delivery() string {
	_, random, _ := strings.Cut(string(t), ".")
	_, delivery, _ := strings.Cut(random, ".")
	return strings.TrimSuffix(delivery, superseding)
}

func (t Token) sameDelivery(other Token) bool {
	return t != other && t.delivery() != "" && t.delivery() == other.delivery()
}

func (t Token) supersedes() bool { return strings.HasSuffix(string(t), superseding) }

// A Grant is a Store's yes.
type Grant struct {
	// Fence is larger than that of every earlier grant of the same key to another
	// token. An upstream that refuses a fence below the highest it has seen is safe
	// even where the lock cannot be (see the README). A Store without fences says 0.
	Fence int64

	// TTL is how long the lock lasts, counted from some moment between asking and
	// being answered: a holder must count from before it asked.
	TTL time.Duration
}

// A Successor is whom a key was handed over to.
type Successor struct {
	// Token is the one that holds the key by now; empty if the key is free.
	Token Token

	// Grant is complete if Token is of the same process as the claim that was released: its
	// caller may start on it, counting from before the release was sent. Any other must ask,
	// for which it has about a second, or loses its place and those of its process.
	Grant Grant
}

// A Listener hears from a Store. Its functions must not block.
type Listener struct {
	// Handed is called when the key that token waits for was handed over to it, or its place was
	// taken by a claim that supersedes it: its caller must ask. Messages may be lost, late or repeated.
	Handed func(token Token)

	// Listening is called with true when messages arrive from now on, and with false whenever it
	// is found that they do not. err is nil if that is because the Store is unavailable, and
	// otherwise says why.
	Listening func(on bool, err error)
}
