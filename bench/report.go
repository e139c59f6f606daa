package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// A findings has what each section found; nil for one that did not run.
type findings struct {
	machine     string
	uncontended *uncontended
	contended   *contended
	sites       *sites
	caddies     *caddies
}

// A table is what a section shows.
type table struct {
	title string
	notes string
	head  []string
	rows  [][]string
}

// tables are all there are, those with the details last.
func (f *findings) tables() (all []table) {
	if f.uncontended != nil {
		all = append(all, f.uncontended.summary())
	}
	if f.contended != nil {
		all = append(all, f.contended.table())
	}
	if f.sites != nil {
		all = append(all, f.sites.table())
	}
	if f.caddies != nil {
		all = append(all, f.caddies.table())
	}
	if f.uncontended != nil {
		for _, callers := range f.uncontended.plan.callers {
			all = append(all, f.uncontended.details(callers))
		}
	}
	return all
}

func (u *uncontended) summary() table {
	t := table{
		title: "Nobody else wants the lock: pairs per second, against SETNX+DEL",
		notes: fmt.Sprintf("A pair takes a lock and releases it. Each caller has a name of its own. Median of %d rounds (quartiles).", u.plan.rounds),
		head:  []string{"callers"},
	}
	for _, callers := range u.plan.callers {
		t.head = append(t.head, fmt.Sprint(callers))
	}
	for _, c := range contenders {
		row := []string{c.name}
		for _, callers := range u.plan.callers {
			row = append(row, u.ratio(c.name, plain, callers).String())
		}
		t.rows = append(t.rows, u.out.mark(c.name, row))
	}
	return t
}

func (u *uncontended) details(callers int) table {
	t := table{
		title: fmt.Sprintf("A pair, with %d callers", callers),
		head:  []string{"", "pairs/s", "p50 us", "p99 us", "allocations", "client CPU us", "Redis CPU us"},
	}
	for _, c := range contenders {
		row := []string{c.name}
		runs := u.runs[c.name][callers]
		for _, what := range []func(*pairsMeasure) float64{
			(*pairsMeasure).rate, (*pairsMeasure).p50, (*pairsMeasure).p99,
			(*pairsMeasure).mallocs, (*pairsMeasure).clientCost, (*pairsMeasure).redisCost,
		} {
			row = append(row, number(runs.median(what)))
		}
		t.rows = append(t.rows, u.out.mark(c.name, row))
	}
	return t
}

// contendHead are the columns of those tables that tell of one lock that all want.
var contendHead = []string{"", "of the ideal", "hand-over p50 us", "p99 us", "Jain", "starved", "hung", "overlaps", "calls"}

func (s *contended) table() table {
	t := table{
		title: fmt.Sprintf("All want the same lock: %d callers in %d processes", s.plan.callers, s.plan.processes),
		notes: fmt.Sprintf("Held for %v, then %v of think time. Ideal is held all the time; starved had less than half of the mean; hung waited in vain for %v after everybody else had stopped asking; calls are what clients sent to Redis per lock taken. Medians of %d rounds (quartiles); starved, hung and overlaps: the worst round.",
			s.plan.hold, s.plan.think, drain, s.plan.rounds),
		head: contendHead,
	}
	for _, c := range waiters() {
		runs := s.runs[c.name]
		calls := "-"
		if n, counted := s.calls[c.name]; counted {
			calls = number(n)
		}
		t.rows = append(t.rows, s.out.mark(c.name, []string{
			c.name,
			spreadOf(runs.of((*contendMeasure).share)).String(),
			number(runs.median((*contendMeasure).gapP50)),
			number(runs.median((*contendMeasure).gapP99)),
			spreadOf(runs.of((*contendMeasure).fairness)).String(),
			spreadOf(runs.of((*contendMeasure).hungry)).worst(),
			spreadOf(runs.of((*contendMeasure).hanging)).worst(),
			spreadOf(runs.of((*contendMeasure).doubled)).worst(),
			calls,
		}))
	}
	return t
}

func (s *caddies) table() table {
	proxy := s.runs.median(func(m *caddiesMeasure) float64 { return micros(m.proxy) })
	return table{
		title: fmt.Sprintf("All want the same lock: %d connections to %d Caddys", s.plan.callers, s.plan.processes),
		notes: fmt.Sprintf("The same, seen from the app. What the proxy itself needs between two requests, %s us, is not counted as a gap. Median of %d rounds (quartiles).",
			number(proxy), s.plan.rounds),
		head: contendHead,
		rows: [][]string{s.out.mark(ours, []string{
			"redis_lock",
			spreadOf(s.runs.of((*caddiesMeasure).share)).String(),
			number(s.runs.median(func(m *caddiesMeasure) float64 { return m.gapsBeyond(.50) })),
			number(s.runs.median(func(m *caddiesMeasure) float64 { return m.gapsBeyond(.99) })),
			spreadOf(s.fairness()).String(),
			spreadOf(s.hungry()).worst(),
			"0", // or its round would have no numbers
			s.overlaps().worst(),
			number(s.calls),
		})},
	}
}

func (s *caddies) fairness() []float64 {
	return s.runs.of(func(m *caddiesMeasure) float64 { return m.contendMeasure.fairness() })
}

func (s *caddies) hungry() []float64 {
	return s.runs.of(func(m *caddiesMeasure) float64 { return m.contendMeasure.hungry() })
}

func (s *caddies) overlaps() spread {
	return spreadOf(s.runs.of(func(m *caddiesMeasure) float64 { return m.contendMeasure.doubled() }))
}

func (s *sites) table() table {
	t := table{
		title: fmt.Sprintf("Caddy: requests per second on %d connections, against no module, and what one at a time takes longer", s.plan.connections),
		notes: fmt.Sprintf("POSTs of %d bytes, each with a name of its own, through reverse_proxy. Median of %d rounds (quartiles). %d GETs through the module made %s calls to Redis.",
			bodySize, s.plan.rounds, s.gets, number(s.getCommands)),
		head: []string{"", "POST/s", "POST", "GET", "added p50 us", "added p99 us"},
	}
	label := map[string]string{without: without, plain: "SETNX+DEL in Caddy", ours: "redis_lock"}
	for _, name := range siteNames {
		t.rows = append(t.rows, s.out.mark(name, []string{
			label[name],
			number(spreadOf(s.posts(name)).Median),
			against(s.posts(name), s.posts(without)).String(),
			s.gotRatio(name).String(),
			spreadOf(s.added(name, (*siteMeasure).p50)).String(),
			spreadOf(s.added(name, (*siteMeasure).p99)).String(),
		}))
	}
	return t
}

func (s *sites) gotRatio(name string) spread {
	if name == plain {
		return spread{} // it takes the lock for GETs, too
	}
	return against(s.gotten(name), s.gotten(without))
}

// mark replaces a dropout's numbers by the reason.
func (d dropouts) mark(name string, row []string) []string {
	if err := d[name]; err != nil {
		return []string{row[0], "out: " + strings.ReplaceAll(err.Error(), "\n", " ")}
	}
	return row
}

func (t table) text(w io.Writer) error {
	fmt.Fprintf(w, "\n%s\n", t.title)
	if t.notes != "" {
		fmt.Fprintf(w, "%s\n", t.notes)
	}
	columns := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	for _, row := range append([][]string{t.head}, t.rows...) {
		fmt.Fprintln(columns, strings.Join(row, "\t"))
	}
	return columns.Flush()
}

func (t table) markdown(w io.Writer) {
	fmt.Fprintf(w, "\n**%s.**", t.title)
	if t.notes != "" {
		fmt.Fprintf(w, " %s", t.notes)
	}
	fmt.Fprintf(w, "\n\n| %s |\n|%s\n", strings.Join(t.head, " | "), strings.Repeat("---|", len(t.head)))
	for _, row := range t.rows {
		fmt.Fprintf(w, "| %s |\n", strings.ReplaceAll(strings.Join(row, " | "), "<", "&lt;"))
	}
}

// text writes everything for a terminal.
func (f *findings) text(w io.Writer) error {
	fmt.Fprintln(w, f.machine)
	for _, t := range append(f.tables(), barsTable(f.bars())) {
		if err := t.text(w); err != nil {
			return err
		}
	}
	return nil
}

// markdown writes everything for the README.
func (f *findings) markdown(w io.Writer) {
	fmt.Fprintf(w, "%s.\n", f.machine)
	for _, t := range append(f.tables(), barsTable(f.bars())) {
		t.markdown(w)
	}
}
