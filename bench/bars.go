package main

import (
	"fmt"
	"math"
)

// A bar is something that this repository wants to be true of a run.
type bar struct {
	what, want, got string
	met             bool
}

// bars are judged by medians. There are none for a section that did not run.
func (f *findings) bars() (all []bar) {
	atLeast := func(what string, want, got float64) {
		all = append(all, bar{what, "at least " + number(want), number(got), got >= want})
	}
	atMost := func(what string, want, got float64) {
		all = append(all, bar{what, "at most " + number(want), number(got), got <= want})
	}
	if u := f.uncontended; u != nil {
		for _, callers := range u.plan.callers {
			switch callers {
			case 1:
				atLeast("1 caller: pairs/s against "+bsm, 1, u.ratio(ours, bsm, callers).Median)
			case 64, 256:
				name, ratio := u.best(callers)
				atLeast(fmt.Sprintf("%d callers: pairs/s against the best other lock library, %s", callers, name), 1.5, ratio)
			}
		}
	}
	if s := f.sites; s != nil {
		atLeast("Caddy: POST/s against no module", .85, against(s.posts(ours), s.posts(without)).Median)
		atLeast("Caddy: GET/s against no module, unchanged but for noise", .97, s.gotRatio(ours).Median)
		atMost("Caddy: calls to Redis of all GETs", 0, s.getCommands)
		atMost("Caddy: added p50 at low load against that of "+plain, 1.3,
			against(s.added(ours, (*siteMeasure).p50), s.added(plain, (*siteMeasure).p50)).Median)
	}
	if s := f.caddies; s != nil {
		atLeast("contended Caddys: of the ideal", .90, spreadOf(s.runs.of((*caddiesMeasure).share)).Median)
		atLeast("contended Caddys: Jain", .98, spreadOf(s.fairness()).Median)
		atMost("contended Caddys: starved, in the worst round", 0, spreadOf(s.hungry()).Max)
		atMost("contended Caddys: overlaps, in the worst round", 0, s.overlaps().Max)
		atMost("contended Caddys: calls to Redis per request", 3, s.calls)
	}
	return all
}

// libraries are the contenders that a user could take instead of this repository's.
var libraries = []string{bsm, reds, rueidi}

// best returns the library that comes closest to ours.
func (u *uncontended) best(callers int) (name string, ratio float64) {
	ratio = math.NaN()
	for _, library := range libraries {
		if r := u.ratio(ours, library, callers).Median; math.IsNaN(ratio) || r < ratio {
			name, ratio = library, r
		}
	}
	return name, ratio
}

func barsTable(bars []bar) table {
	t := table{title: "What this repository wants to be true", head: []string{"", "wanted", "this run", ""}}
	for _, b := range bars {
		verdict := "MISSED"
		if b.met {
			verdict = "met"
		}
		t.rows = append(t.rows, []string{b.what, b.want, b.got, verdict})
	}
	return t
}
