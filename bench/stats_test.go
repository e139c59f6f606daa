package main

import (
	"math"
	"slices"
	"testing"
	"time"
)

func TestQuantile(t *testing.T) {
	sorted := []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for q, want := range map[float64]int{0: 1, .1: 1, .5: 5, .51: 6, .99: 10, 1: 10} {
		if got := quantile(sorted, q); got != want {
			t.Errorf("quantile(%v) = %v, want %v", q, got, want)
		}
	}
	if got := quantile([]int(nil), .5); got != 0 {
		t.Errorf("quantile of nothing = %v, want 0", got)
	}
}

func TestSpread(t *testing.T) {
	nan := math.NaN()
	for _, test := range []struct {
		values []float64
		want   string
	}{
		{[]float64{3, 1, 2}, "2.00 (1.00-3.00)"},
		{[]float64{4, 1, 2, 3}, "2.50 (1.00-3.00)"},
		{[]float64{9, 1, 2, 3, 4, 5, 6, 7, 8}, "5.00 (3.00-7.00)"},
		{[]float64{nan, .5, math.Inf(1), nan}, "0.500"},
		{[]float64{nan}, "-"},
		{nil, "-"},
		{[]float64{-5, 0, 123.4}, "0 (-5.00-123)"},
	} {
		if got := spreadOf(test.values).String(); got != test.want {
			t.Errorf("spread of %v = %s, want %s", test.values, got, test.want)
		}
	}
	values := []float64{3, 1, 2}
	spreadOf(values)
	if !slices.Equal(values, []float64{3, 1, 2}) {
		t.Errorf("the rounds' order is lost: %v", values)
	}
}

func TestAgainst(t *testing.T) {
	nan := math.NaN()
	// The second half of the run was twice as fast for both; the ratio does not see it.
	if got := against([]float64{1, 2, 3, nan}, []float64{2, 4, 4, 8}); got != (spread{.5, .5, .75, .75, 3}) {
		t.Errorf("got %+v", got)
	}
}

func TestFairness(t *testing.T) {
	for _, test := range []struct {
		counts  []int
		jain    float64
		starved int
	}{
		{[]int{5, 5, 5, 5}, 1, 0},
		{[]int{20, 0, 0, 0}, .25, 3},
		{[]int{10, 10, 10, 2}, 1024. / (4 * 304), 1},
		{[]int{10, 10, 5, 5}, .9, 0},
	} {
		if got := jain(test.counts); math.Abs(got-test.jain) > 1e-9 {
			t.Errorf("jain(%v) = %v, want %v", test.counts, got, test.jain)
		}
		if got := starved(test.counts); got != test.starved {
			t.Errorf("starved(%v) = %v, want %v", test.counts, got, test.starved)
		}
	}
	if got := jain([]int{0, 0}); !math.IsNaN(got) {
		t.Errorf("jain of nothing = %v, want NaN", got)
	}
}

func TestUseOf(t *testing.T) {
	ms := time.Millisecond
	u := useOf([][]interval{
		{{0, 10 * ms}, {20 * ms, 30 * ms}, {95 * ms, 105 * ms}},
		{{11 * ms, 19 * ms}, {28 * ms, 40 * ms}, {101 * ms, 110 * ms}},
	}, window{5 * ms, 100 * ms})
	if want := (5 + 8 + 10 + 12 + 5) * ms; u.held != want {
		t.Errorf("held for %v, want %v", u.held, want)
	}
	if !slices.Equal(u.counts, []int{2, 2}) || u.acquired != 4 {
		t.Errorf("acquired %d: %v, want 4: [2 2]", u.acquired, u.counts)
	}
	if want := []time.Duration{1 * ms, 1 * ms, 55 * ms}; !slices.Equal(u.gaps, want) {
		t.Errorf("gaps %v, want %v", u.gaps, want)
	}
	if u.overlaps != 1 {
		t.Errorf("%d overlaps, want 1", u.overlaps)
	}
}

func TestRotated(t *testing.T) {
	items := []int{1, 2, 3}
	for round, want := range [][]int{{1, 2, 3}, {2, 3, 1}, {3, 1, 2}, {1, 2, 3}} {
		if got := rotated(items, round); !slices.Equal(got, want) {
			t.Errorf("round %d: %v, want %v", round, got, want)
		}
	}
	if !slices.Equal(items, []int{1, 2, 3}) {
		t.Errorf("the items have changed: %v", items)
	}
}
