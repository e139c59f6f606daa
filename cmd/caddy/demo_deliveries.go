package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// gap lies between two deliveries. It makes clear who comes first, and is short enough that
// the last one for shop comes while the first one still runs.
const gap = 100 * time.Millisecond

// plan is what is sent, in this order: enough for shop that its line gets full, and blog
// while shop is busy.
var plan = []batch{{"shop", 5}, {"blog", 2}}

type batch struct {
	name  string
	count int
}

func (b batch) path() string { return "/hooks/" + b.name }

// A delivery is one webhook, and what became of it.
type delivery struct {
	batch
	number         int // from 1, within its batch
	sent, answered time.Time
	status         int
	err            error // instead of a status
	ran            span  // as the app saw it
}

func (d delivery) id() string { return fmt.Sprintf("%s #%d", d.name, d.number) }

// sendAll sends the plan to Caddy and waits for all answers.
func sendAll(ctx context.Context, url string) []delivery {
	var deliveries []delivery
	for _, b := range plan {
		for i := range b.count {
			deliveries = append(deliveries, delivery{batch: b, number: i + 1})
		}
	}
	// Beyond what the configuration lets any of them wait. No proxy from the environment.
	client := &http.Client{Transport: &http.Transport{}, Timeout: 15 * time.Second}
	defer client.CloseIdleConnections()
	var all sync.WaitGroup
	for i := range deliveries {
		all.Go(func() { deliveries[i].send(ctx, client, url) })
		sleep(ctx, gap)
	}
	all.Wait()
	return deliveries
}

func (d *delivery) send(ctx context.Context, client *http.Client, url string) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+d.path(), nil)
	if err != nil {
		d.err = err
		return
	}
	request.Header.Set(idHeader, d.id())
	d.sent = time.Now()
	response, err := client.Do(request)
	if err != nil {
		d.err = err
		return
	}
	defer response.Body.Close()
	_, d.err = io.Copy(io.Discard, response.Body)
	d.answered = time.Now()
	d.status = response.StatusCode
}

// verify says what is not as the lock promises it.
func verify(deliveries []delivery, mostAtOnce map[string]int) error {
	for _, d := range deliveries {
		if most := mostAtOnce[d.path()]; most > 1 {
			return fmt.Errorf("%s: the lock did not hold: %d ran at the same time", d.path(), most)
		}
		ran := d.ran != span{}
		switch {
		case d.err != nil:
			return fmt.Errorf("%s: no answer: %w", d.id(), d.err)
		case d.status != http.StatusOK && d.status != http.StatusLocked:
			return fmt.Errorf("%s: unexpected status %d; want 200 or 423", d.id(), d.status)
		case ran && d.status != http.StatusOK:
			return fmt.Errorf("%s: status %d, although it ran", d.id(), d.status)
		case !ran && d.status == http.StatusOK:
			return fmt.Errorf("%s: status %d, although it did not run", d.id(), d.status)
		}
	}
	return nil
}
