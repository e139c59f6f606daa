package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// quantile returns the q-th quantile of sorted values, by the nearest rank; 0 of none.
func quantile[T cmp.Ordered](sorted []T, q float64) T {
	if len(sorted) == 0 {
		var zero T
		return zero
	}
	rank := int(math.Ceil(q * float64(len(sorted))))
	return sorted[max(rank, 1)-1]
}

// A spread is what several rounds said: the median and the quartiles, which show how much a
// round differs from the next, and the worst one.
type spread struct {
	Median, Low, High float64
	Max               float64
	Rounds            int
}

// spreadOf leaves out what is not a number: a round in which a contender, or what it is compared
// with, had no result.
func spreadOf(values []float64) spread {
	values = slices.DeleteFunc(slices.Clone(values), func(v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) })
	if len(values) == 0 {
		return spread{Median: math.NaN(), Low: math.NaN(), High: math.NaN(), Max: math.NaN()}
	}
	slices.Sort(values)
	middle := len(values) / 2
	median := values[middle]
	if len(values)%2 == 0 {
		median = (values[middle-1] + values[middle]) / 2
	}
	return spread{
		Median: median,
		Low:    quantile(values, .25),
		High:   quantile(values, .75),
		Max:    values[len(values)-1],
		Rounds: len(values),
	}
}

func (s spread) String() string {
	if s.Rounds == 0 {
		return "-"
	}
	if s.Rounds == 1 {
		return number(s.Median)
	}
	return fmt.Sprintf("%s (%s-%s)", number(s.Median), number(s.Low), number(s.High))
}

// worst is the highest of some counts.
func (s spread) worst() string {
	if s.Rounds == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f", s.Max)
}

// number writes three digits that count.
func number(v float64) string {
	switch size := math.Abs(v); {
	case math.IsNaN(v):
		return "-"
	case size == 0 || size >= 100:
		return fmt.Sprintf("%.0f", v)
	case size >= 10:
		return fmt.Sprintf("%.1f", v)
	case size >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// jain is Jain's index of fairness: 1 if all have the same, 1/n if one has all.
func jain(counts []int) float64 {
	var sum, squares float64
	for _, n := range counts {
		sum += float64(n)
		squares += float64(n) * float64(n)
	}
	if squares == 0 {
		return math.NaN()
	}
	return sum * sum / (float64(len(counts)) * squares)
}

// starved is how many have less than half of the mean.
func starved(counts []int) (n int) {
	total := 0
	for _, count := range counts {
		total += count
	}
	for _, count := range counts {
		if 2*count*len(counts) < total {
			n++
		}
	}
	return n
}

// An interval is when a lock was held, by the machine's monotonic clock.
type interval struct{ From, To time.Duration }

// A window is the part of a slice that counts: without its beginning, when everybody arrives
// at once, and without its end, when nobody arrives any more.
type window = interval

// A usage is what the holders of one lock did in a window.
type usage struct {
	held     time.Duration   // all in all
	acquired int             // holdings that began
	gaps     []time.Duration // from the end of each to the beginning of the next one, sorted
	overlaps int             // holdings that began before the last one had ended
	counts   []int           // of each caller
}

// useOf sums up what callers held. A gap belongs to the holding after it.
func useOf(callers [][]interval, w window) usage {
	u := usage{counts: make([]int, len(callers))}
	var all []interval
	for i, held := range callers {
		all = append(all, held...)
		for _, h := range held {
			if w.From <= h.From && h.From < w.To {
				u.counts[i]++
				u.acquired++
			}
		}
	}
	slices.SortFunc(all, func(a, b interval) int { return cmp.Compare(a.From, b.From) })
	var end time.Duration // of the last one so far
	for i, h := range all {
		u.held += max(0, min(h.To, w.To)-max(h.From, w.From))
		if i > 0 && w.From <= h.From && h.From < w.To {
			if h.From < end {
				u.overlaps++
			} else {
				u.gaps = append(u.gaps, h.From-end)
			}
		}
		end = max(end, h.To)
	}
	slices.Sort(u.gaps)
	return u
}
