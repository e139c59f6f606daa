package main

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// found is a run in which redsync hung, and nothing but the uncontended section ran.
func found() *findings {
	u := &uncontended{
		plan: pairsPlan{callers: []int{1, 64}, rounds: 2},
		runs: make(map[string]map[int]series[pairsMeasure]),
		out:  dropouts{reds: errors.New("round 1: hung")},
	}
	for name, pairs := range map[string]int{ours: 300, bsm: 100, reds: 0, rueidi: 150, plain: 120, floor: 130} {
		u.runs[name] = make(map[int]series[pairsMeasure])
		for _, callers := range u.plan.callers {
			s := make(series[pairsMeasure], 2)
			if pairs > 0 {
				s[1] = &pairsMeasure{pairsResult: pairsResult{Pairs: pairs, Elapsed: time.Second}}
			}
			u.runs[name][callers] = s
		}
	}
	return &findings{machine: "a machine", uncontended: u}
}

func TestBars(t *testing.T) {
	bars := found().bars()
	if len(bars) != 2 {
		t.Fatalf("%d bars, want those of 1 and 64 callers: %v", len(bars), bars)
	}
	if b := bars[0]; !b.met || b.got != "3.00" {
		t.Errorf("against bsm: %+v", b)
	}
	if b := bars[1]; !b.met || b.got != "2.00" || !strings.HasSuffix(b.what, rueidi) {
		t.Errorf("against the best: %+v", b)
	}
	slow := found()
	slow.uncontended.runs[ours][64][1].Pairs = 200
	if b := slow.bars()[1]; b.met {
		t.Errorf("200 are not 1.5 times 150: %+v", b)
	}
	unknown := found()
	unknown.uncontended.runs[ours][64][1] = nil
	if b := unknown.bars()[1]; b.met || b.got != "-" {
		t.Errorf("without a result: %+v", b)
	}
}

func TestReports(t *testing.T) {
	f := found()
	var text, markdown, svg strings.Builder
	if err := f.text(&text); err != nil {
		t.Fatal(err)
	}
	f.markdown(&markdown)
	if err := f.plot(&svg); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a machine", "2.50", "out: round 1: hung", "met"} {
		if !strings.Contains(text.String(), want) || !strings.Contains(markdown.String(), want) {
			t.Errorf("%q is missing in\n%s\n%s", want, &text, &markdown)
		}
	}
	if !strings.Contains(svg.String(), "<svg") || !strings.Contains(svg.String(), rueidi) {
		t.Error("no plot, or one without its legend")
	}
}
