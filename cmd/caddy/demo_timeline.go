package main

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"
)

const (
	finest = 50 * time.Millisecond // of the timeline, per column
	width  = 40                    // of the timeline, in columns; leaves room for text in 80
)

// A scale places moments in the columns of a timeline.
type scale struct {
	from   time.Time
	column time.Duration
}

// scaleOf fits all deliveries into the width.
func scaleOf(deliveries []delivery) scale {
	s := scale{deliveries[0].sent, finest}
	for _, d := range deliveries {
		for s.at(d.answered) >= width {
			s.column *= 2
		}
	}
	return s
}

// at rounds, so that of two spans without an overlap none is drawn.
func (s scale) at(moment time.Time) int {
	return int(moment.Sub(s.from).Round(s.column) / s.column)
}

// timeline draws a row for each delivery, under an axis.
func timeline(deliveries []delivery) string {
	var out strings.Builder
	s := scaleOf(deliveries)
	out.WriteString(s.axis())
	for _, d := range deliveries {
		fmt.Fprintf(&out, "%-8s %-*s  %s\n", d.id(), width, s.bar(d), outcome(d))
	}
	fmt.Fprintf(&out, "\n%-8s ░ waits in line   █ runs in the app   × is refused\n", "")
	return out.String()
}

// axis labels every tenth column.
func (s scale) axis() string {
	const step = 10
	labels, ticks := strings.Repeat(" ", 9), strings.Repeat(" ", 9)
	for column := 0; column < width; column += step {
		labels += fmt.Sprintf("%-*s", step, seconds(time.Duration(column)*s.column))
		ticks += fmt.Sprintf("%-*s", step, "|")
	}
	return strings.TrimRight(labels, " ") + "\n" + strings.TrimRight(ticks, " ") + "\n"
}

func (s scale) bar(d delivery) string {
	switch {
	case d.ran != span{}:
		return bar(s.at(d.sent), s.at(d.ran.from), s.at(d.ran.to), "")
	case d.err == nil:
		return bar(s.at(d.sent), s.at(d.answered), s.at(d.answered), "×")
	}
	return ""
}

func bar(sent, begun, ended int, end string) string {
	return strings.Repeat(" ", sent) + strings.Repeat("░", begun-sent) + strings.Repeat("█", ended-begun) + end
}

// outcome is the status and, in words, what led to it.
func outcome(d delivery) string {
	if d.err != nil {
		return "no answer"
	}
	end, waited := "ran", d.ran.from.Sub(d.sent)
	if d.ran == (span{}) {
		end, waited = "refused", d.answered.Sub(d.sent)
	}
	if waited < finest {
		return fmt.Sprintf("%d  %s at once", d.status, end)
	}
	return fmt.Sprintf("%d  waited %s, then %s", d.status, seconds(waited), end)
}

// summary counts what ran at the same time, and the answers.
func summary(deliveries []delivery, mostAtOnce map[string]int) string {
	var most []string
	answers := make(map[string]int)
	for _, d := range deliveries {
		if d.number == 1 {
			most = append(most, fmt.Sprintf("%d for %s", mostAtOnce[d.path()], d.name))
		}
		answers[answer(d)]++
	}
	var counts []string
	for _, text := range slices.Sorted(maps.Keys(answers)) {
		counts = append(counts, fmt.Sprintf("%d × %s", answers[text], text))
	}
	return fmt.Sprintf("Most at the same time:  %s\nAnswers:                %s\n",
		strings.Join(most, ", "), strings.Join(counts, ", "))
}

func answer(d delivery) string {
	if d.err != nil {
		return "no answer"
	}
	return fmt.Sprintf("%d %s", d.status, http.StatusText(d.status))
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1fs", d.Seconds()) }
