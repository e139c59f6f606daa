package lock

import (
	"fmt"
	"strconv"
)

// What the model knows of the protocols: what the lock's key holds, and what that means. For getset
// modelKeys.main is the second in the key; for token it is the caller whose token it is, or foreigner.

const foreigner = 0 // a program of the token protocol's convention

// mainText is what the key holds.
func (m *model) mainText(main int8) string {
	switch {
	case m.protocol == getsetProtocol:
		return strconv.Itoa(second0 + int(main))
	case main == foreigner:
		return "foreign"
	}
	return string(m.token(main))
}

func (m *model) mainOf(text string) int8 {
	switch {
	case m.protocol == getsetProtocol:
		return int8(max(longAgo/perSecond, must(strconv.Atoi(text))-second0))
	case text == "foreign":
		return foreigner
	}
	return m.caller(text)
}

// endText is what the holder record says of the lock's end.
func (m *model) endText(e int8) string {
	if m.protocol == getsetProtocol {
		return m.mainText(e / perSecond)
	}
	return fmt.Sprintf("%.3f", second0+float64(e)/perSecond)
}

func (m *model) endOf(text string) int8 {
	return m.ticksOf(int64(must(strconv.ParseFloat(text, 64)) * 1e6))
}

// shift moves all moments by seconds.
func (m *model) shift(k *modelKeys, seconds int8) {
	if k.main != never && m.protocol == getsetProtocol {
		k.main = max(longAgo/perSecond, k.main+seconds)
	}
	for _, s := range []*int8{&k.e, &k.mainEnd, &k.l, &k.lineEnd, &k.alive[0], &k.alive[1], &k.aliveEnd} {
		if *s != never {
			*s = max(longAgo, *s+seconds*perSecond)
		}
	}
}

// isHolders is true if the key is as the holder of the record left it.
func (m *model) isHolders(k *modelKeys) bool {
	if m.protocol == getsetProtocol {
		return k.main != never && k.main*perSecond == k.e && k.mainEnd != never
	}
	return k.main == k.t
}

// isOwned is true if scripts take the record's token for that of a live holder.
func (m *model) isOwned(k *modelKeys) bool {
	if m.protocol == getsetProtocol {
		return k.e != never && k.e >= 0 // whole seconds
	}
	return k.main == k.t
}

// blockedUntil is when the keys stop being in somebody's way, if nobody writes to them.
func (m *model) blockedUntil(k *modelKeys) int8 {
	if m.protocol == tokenProtocol {
		if k.main == never {
			return 0
		}
		return k.mainEnd
	}
	until := int8(0)
	if k.main != never {
		until = k.main * perSecond
	}
	if k.t > 0 && k.e != never {
		until = max(until, k.e)
	}
	return until + perSecond
}

// checkKey is about what a script did to the key.
func (m *model) checkKey(now int8, before, after *modelKeys) {
	same := after.main == before.main && after.mainEnd == before.mainEnd
	if m.protocol == tokenProtocol {
		check(same || after.main == never || after.main == after.t && after.mainEnd == after.e,
			"main's TTL is missing, or not the lock's end")
		check(same || before.main != foreigner, "the key of a foreign program is written to")
		return
	}
	check(after.main == before.main || after.main == never || after.mainEnd >= (after.main+2)*perSecond && after.mainEnd != never,
		"main's TTL is missing, or too short")
	foreign := before.main != never && before.mainEnd == never && before.main >= now/perSecond
	check(same || !foreign, "the key of a foreign program is written to")
}

// foreignWrite is what a foreign program does: one of the published pattern writes whenever it likes,
// one of the other convention only where nobody is in its way, and is sure of its lock then.
func (m *model) foreignWrite(w *world) {
	k := &w.keys
	if m.protocol == getsetProtocol {
		k.main, k.mainEnd = w.now/perSecond+2, never
		return
	}
	if k.main != never {
		return
	}
	k.main, k.mainEnd = foreigner, w.now+perSecond
	m.checkForeigner(w)
}

// checkForeigner is for whenever a caller or a foreign program starts.
func (m *model) checkForeigner(w *world) {
	if m.protocol == getsetProtocol || w.keys.main != foreigner {
		return
	}
	for i := range m.callers {
		check(w.callers[i].stage != running, "caller %d and a foreign program run at once", i+1)
	}
}

// foreignKeeps is a key of the holder's that loses its TTL, for the published pattern by a GETSET of the same
// second.
func (m *model) foreignKeeps(k *modelKeys) {
	switch {
	case m.protocol == tokenProtocol && k.main == k.t && k.t > 0:
		k.mainEnd = never
	case m.protocol == getsetProtocol && k.e != never && k.e > 0:
		k.main, k.mainEnd = k.e/perSecond, never
	}
}
