package main

import (
	"fmt"
	"image/color"
	"io"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// hues are the contenders' colours, told apart by the colour-blind, too (Okabe and Ito).
var hues = map[string]color.Color{
	ours:   color.RGBA{0xd5, 0x5e, 0x00, 0xff},
	bsm:    color.RGBA{0x00, 0x72, 0xb2, 0xff},
	reds:   color.RGBA{0xcc, 0x79, 0xa7, 0xff},
	rueidi: color.RGBA{0x00, 0x9e, 0x73, 0xff},
	plain:  color.RGBA{0x56, 0xb4, 0xe9, 0xff},
	floor:  color.RGBA{0x80, 0x80, 0x80, 0xff},
}

const panelWidth, panelHeight = 12 * vg.Centimeter, 8 * vg.Centimeter

// plot draws an SVG with a panel for each section that ran.
func (f *findings) plot(w io.Writer) error {
	var panels []*plot.Plot
	if f.uncontended != nil {
		panel, err := f.uncontended.panel()
		if err != nil {
			return fmt.Errorf("plot: %w", err)
		}
		panels = append(panels, panel)
	}
	for _, bars := range f.columns() {
		panel, err := bars.panel()
		if err != nil {
			return fmt.Errorf("plot: %w", err)
		}
		panels = append(panels, panel)
	}
	canvas := vgsvg.New(panelWidth*vg.Length(len(panels)), panelHeight)
	tiles := draw.Tiles{Rows: 1, Cols: len(panels), PadTop: 4, PadBottom: 4, PadLeft: 4, PadRight: 12}
	for i, area := range plot.Align([][]*plot.Plot{panels}, tiles, draw.New(canvas))[0] {
		panels[i].Draw(area)
	}
	_, err := canvas.WriteTo(w)
	return err
}

// panel has a line for each contender, over the number of callers.
func (u *uncontended) panel() (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = "Pairs per second, times SETNX+DEL"
	p.X.Label.Text = "callers"
	p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.TickerFunc(powersOfTwo)
	p.Legend.Top, p.Legend.Left = true, true
	var ticks []plot.Tick
	for i, callers := range u.plan.callers {
		ticks = append(ticks, plot.Tick{Value: float64(i), Label: fmt.Sprint(callers)})
	}
	p.X.Tick.Marker = plot.ConstantTicks(ticks)
	for _, c := range contenders {
		var points plotter.XYs
		for i, callers := range u.plan.callers {
			if s := u.ratio(c.name, plain, callers); s.Rounds > 0 {
				points = append(points, plotter.XY{X: float64(i), Y: s.Median})
			}
		}
		if len(points) == 0 {
			continue // out
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		line.Color, line.Width = hues[c.name], vg.Points(1.5)
		dots.Color, dots.Shape = hues[c.name], draw.CircleGlyph{}
		p.Add(line, dots)
		p.Legend.Add(c.name, line, dots)
	}
	p.Y.Max *= 8 // room for the legend
	p.Add(plotter.NewGrid())
	return p, nil
}

func powersOfTwo(low, high float64) (ticks []plot.Tick) {
	for value := math.Exp2(math.Ceil(math.Log2(low))); value <= high; value *= 2 {
		ticks = append(ticks, plot.Tick{Value: value, Label: fmt.Sprint(value)})
	}
	return ticks
}

// A columnChart has one column for each label.
type columnChart struct {
	title  string
	labels []string
	values plotter.Values
	spread []spread
}

func (c *columnChart) add(label string, s spread) {
	if s.Rounds > 0 {
		c.labels, c.values, c.spread = append(c.labels, label), append(c.values, s.Median), append(c.spread, s)
	}
}

func (f *findings) columns() (all []columnChart) {
	if f.contended != nil {
		chart := columnChart{title: "Contended: held, of all time"}
		for _, c := range waiters() {
			chart.add(c.name, spreadOf(f.contended.runs[c.name].of((*contendMeasure).share)))
		}
		if f.caddies != nil {
			chart.add("redis_lock", spreadOf(f.caddies.runs.of((*caddiesMeasure).share)))
		}
		all = append(all, chart)
	}
	if f.sites != nil {
		chart := columnChart{title: "Caddy: POST per second, of no module"}
		for _, name := range siteNames {
			chart.add(name, against(f.sites.posts(name), f.sites.posts(without)))
		}
		all = append(all, chart)
	}
	return all
}

// panel draws the columns from zero, with the spread of the rounds.
func (c columnChart) panel() (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = c.title
	columns, err := plotter.NewBarChart(c.values, vg.Points(30))
	if err != nil {
		return nil, err
	}
	columns.Color = hues[plain]
	columns.LineStyle.Width = 0
	spreads, err := plotter.NewYErrorBars(c)
	if err != nil {
		return nil, err
	}
	p.Add(columns, spreads)
	p.Y.Min, p.Y.Max = 0, max(p.Y.Max, 1)
	p.NominalX(c.labels...)
	return p, nil
}

// Len, XY and YError make a chart what plotter.NewYErrorBars takes.
func (c columnChart) Len() int                { return len(c.values) }
func (c columnChart) XY(i int) (x, y float64) { return float64(i), c.values[i] }
func (c columnChart) YError(i int) (low, high float64) {
	s := c.spread[i]
	return s.Median - s.Low, s.High - s.Median
}
