package lock

import (
	"testing"
	"testing/synctest"
	"time"
)

// Deliveries do not pile up in the process: those whose time has passed are forgotten.
func TestOldDeliveriesAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := NewMemory().(*memory)
		process := NewProcess()
		for i := range 20_000 {
			token := process.NewToken().Handling(string(process.NewToken()))
			_, _ = m.Release(t.Context(), "key", Claim{Token: token, Done: time.Minute})
			if i > 0 && m.Inspect(t.Context(), "key", token) != ErrDone {
				t.Fatal("a new one was forgotten")
			}
			time.Sleep(time.Second)
		}
		if n := len(m.done); n > 2000 {
			t.Errorf("%d deliveries are kept where 60 count", n)
		}
	})
}
