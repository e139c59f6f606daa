package lock

import (
	"errors"
	"fmt"
	"time"
)

// What can go wrong, told apart with errors.Is. Contention (ErrHeld, ErrTimeout,
// ErrLineFull), a caller that is not needed any more (ErrDone, ErrSuperseded), an unreachable
// Store (ErrUnavailable) and a lock that is no longer ours (ErrLost) never stand for one another. No error text contains a lock's name:
// names are often user input.
var (
	// ErrHeld: somebody else has the lock, and the caller did not want to wait.
	// The error is a [*HeldError].
	ErrHeld = errors.New("lock is held")

	// ErrTimeout: somebody else had the lock, or stood in line before the caller,
	// until the caller's [Wait] ran out. The error is a [*TimeoutError].
	ErrTimeout = errors.New("lock was not free within the wait")

	// ErrLineFull: as many callers as [Queue] allows already wait for the lock. The error is a
	// [*LineFullError].
	ErrLineFull = errors.New("line of those waiting for the lock is full")

	// ErrDone: the caller's delivery was handled already, see [Dedupe]. There is nothing to do.
	ErrDone = errors.New("delivery was handled already")

	// ErrSuperseded: a newer caller has taken the place of this one, see [Supersede].
	ErrSuperseded = errors.New("a newer request has taken the place in line")

	// ErrLost: the lock stopped being surely ours before it was released: its lease
	// passed, or somebody deleted or overwrote it. The error is a [*LostError].
	ErrLost = errors.New("lock is lost")

	// ErrUnavailable: the Store could not be asked, or did not answer in time, so
	// nothing is known about the lock. The error is an [*UnavailableError].
	ErrUnavailable = errors.New("lock store is unavailable")

	// ErrReleased is the cause ([context.Cause]) of a handle's context that ended
	// because the lock was released.
	ErrReleased = errors.New("lock was released")
)

// A Reason says why a Store refused an operation.
type Reason string

// Restarted, in a [HeldError] or a [LostError], says nothing of the lock: the node of a quorum may
// have forgotten what it knew, and has no vote as long as that may matter, see [NewQuorum]. The
// quorum itself never answers with it.
const Restarted Reason = "restarted"

// Reasons in a [HeldError].
const (
	Held          Reason = "held"           // a live lock
	Free          Reason = "free"           // nobody's, but the claim was for a place in line only
	OwnerLive     Reason = "owner-live"     // the key is gone or overwritten, but its owner's lease still runs
	ForeignHolder Reason = "foreign-holder" // a live lock of a program that knows nothing of the line
	SameDelivery  Reason = "same-delivery"  // a live lock, for the claim's own delivery
	ForeignValue  Reason = "foreign-value"  // the key holds something that is no lock, or one that never ends
)

// Reasons in a [LostError].
const (
	NotOwner      Reason = "not-owner"      // the lock belongs to another token, or to nobody
	Expired       Reason = "expired"        // its lease has passed
	MainGone      Reason = "main-gone"      // its key was deleted
	MainChanged   Reason = "main-changed"   // its key holds another value
	MainRewritten Reason = "main-rewritten" // its key holds the same value, written by somebody else
)

// HeldError is an [ErrHeld].
type HeldError struct {
	Why Reason

	// For is how long the lock in the way lasts, by the Store's clock, unless it is
	// renewed or released. Zero: not known.
	For time.Duration

	// Place is the claim's in the line, if it waits: smaller ones come before it. NewPlace is
	// true if it had none before.
	Place    int64
	NewPlace bool

	// Line is how many wait, as far as is known.
	Line int
}

func (e *HeldError) Error() string { return explain(ErrHeld, e.Why) }

// Unwrap makes errors.Is(err, ErrHeld) true.
func (e *HeldError) Unwrap() error { return ErrHeld }

// TimeoutError is an [ErrTimeout].
type TimeoutError struct {
	// Why the Store refused the lock at last; empty if it was not asked.
	Why Reason

	// Line is how many others wait, as far as is known.
	Line int
}

func (e *TimeoutError) Error() string { return explain(ErrTimeout, e.Why) }

// Unwrap makes errors.Is(err, ErrTimeout) true.
func (e *TimeoutError) Unwrap() error { return ErrTimeout }

// LineFullError is an [ErrLineFull].
type LineFullError struct {
	// Why the Store refused the lock; empty if it was not asked.
	Why Reason

	// Line is how many wait, as far as is known.
	Line int
}

func (e *LineFullError) Error() string { return explain(ErrLineFull, e.Why) }

// Unwrap makes errors.Is(err, ErrLineFull) true.
func (e *LineFullError) Unwrap() error { return ErrLineFull }

// explain says what a person can do where waiting does not help.
func explain(err error, why Reason) string {
	if why == SameDelivery {
		return err.Error() + ": the same delivery is being handled"
	}
	if why == ForeignValue {
		return err.Error() + ": its key contains something that is not a lock; delete the key if no other program needs it"
	}
	return err.Error()
}

// NewestError is why a caller does not get the lock that had stood in line, or may have, to
// [Supersede] others: nobody runs in place of those that it displaced. It wraps any other error.
type NewestError struct{ Err error }

func (e *NewestError) Error() string { return e.Err.Error() }

// Unwrap returns the error.
func (e *NewestError) Unwrap() error { return e.Err }

// LostError is an [ErrLost].
type LostError struct {
	Why Reason
}

func (e *LostError) Error() string { return fmt.Sprintf("%v (%s)", ErrLost, e.Why) }

// Unwrap makes errors.Is(err, ErrLost) true.
func (e *LostError) Unwrap() error { return ErrLost }

// UnavailableError is an [ErrUnavailable].
type UnavailableError struct {
	// Doubtful is true if the Store may have carried out the operation although no
	// answer arrived.
	Doubtful bool

	// ThisKey is true if the Store answers, but not about this key: the user may not
	// touch it, say. Other keys are not concerned.
	ThisKey bool

	// Err is the cause, for instance a refused connection.
	Err error
}

func (e *UnavailableError) Error() string { return fmt.Sprintf("%v: %v", ErrUnavailable, e.Err) }

// Unwrap makes errors.Is true for ErrUnavailable and for the cause.
func (e *UnavailableError) Unwrap() []error { return []error{ErrUnavailable, e.Err} }
