package main

import (
	"errors"
	"fmt"
	"math"
	"os"
)

// rotated returns items with another one first in each round, so that nobody always follows
// the same one.
func rotated[T any](items []T, round int) []T {
	n := round % len(items)
	return append(append([]T(nil), items[n:]...), items[:n]...)
}

// A series is what one contender's rounds brought; nil for a round without a result.
type series[T any] []*T

// of is one number from each round, or NaN.
func (s series[T]) of(number func(*T) float64) []float64 {
	values := make([]float64, len(s))
	for i, result := range s {
		values[i] = math.NaN()
		if result != nil {
			values[i] = number(result)
		}
	}
	return values
}

// median is that of one number over all rounds.
func (s series[T]) median(number func(*T) float64) float64 { return spreadOf(s.of(number)).Median }

// against compares round by round: what disturbs the machine for longer than a round disturbs
// both.
func against(values, base []float64) spread {
	ratios := make([]float64, len(values))
	for i := range values {
		ratios[i] = values[i] / base[i]
	}
	return spreadOf(ratios)
}

// dropouts says why contenders take no part any more.
type dropouts map[string]error

func (d dropouts) drop(name string, round int, err error) {
	if errors.Is(err, os.ErrDeadlineExceeded) { // a visitor's connection
		err = fmt.Errorf("%w: %w", errHung, err)
	}
	d[name] = fmt.Errorf("round %d: %w", round+1, err)
	progress("%s is out: %v", name, d[name])
}

func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
