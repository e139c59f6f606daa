package lock

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// After a pause of the whole process, a renewal's answer may be there before the timer that
// ends the lock fires: it must not revive it.
func TestPausedProcessDoesNotRevive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(NewMemory(), Options{})
		h, err := l.Acquire(t.Context(), "name", Lease(time.Second))
		if err != nil {
			t.Fatal(err)
		}
		h.StopRenewing()
		h.expiry.Stop() // late
		time.Sleep(2 * time.Second)
		if h.prolong(Grant{Fence: 1, TTL: time.Hour}, time.Now()) {
			t.Error("a lock whose deadline has passed was prolonged")
		}
		if err := h.Release(context.Background()); err == nil {
			t.Error("the release does not say that the lock was lost")
		}
	})
}
