package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// workerCommand is the argument that makes this program a worker.
const workerCommand = "worker"

// An answer is what a worker says after an order.
type answer struct {
	Pairs   *pairsResult   `json:",omitempty"`
	Contend *contendResult `json:",omitempty"`
	Error   string         `json:",omitempty"`
}

// work is the main function of a worker: it carries out the orders on its standard input, one
// after the other, until that ends.
func work(ctx context.Context, name, address string, orders io.Reader, answers io.Writer) error {
	c, err := contenderNamed(name)
	if err != nil {
		return err
	}
	l, err := c.open(address)
	if err != nil {
		return fmt.Errorf("open %s: %w", name, err)
	}
	in, out := json.NewDecoder(orders), json.NewEncoder(answers)
	for {
		var o order
		if err := in.Decode(&o); err == io.EOF {
			return l.close()
		} else if err != nil {
			return err
		}
		if err := out.Encode(carryOut(ctx, l, o)); err != nil {
			return err
		}
	}
}

func carryOut(ctx context.Context, l locker, o order) (a answer) {
	var err error
	if o.Pairs != nil {
		a.Pairs = new(pairsResult)
		*a.Pairs, err = o.Pairs.run(ctx, l)
	} else {
		a.Contend = new(contendResult)
		*a.Contend, err = o.Contend.run(ctx, l)
	}
	if err != nil {
		return answer{Error: err.Error()}
	}
	return a
}

// A worker is a process of one contender. In a process of its own it can be killed when it
// hangs, and its CPU time, its allocations and its garbage are its own.
type worker struct {
	contender string
	cmd       *exec.Cmd
	orders    io.WriteCloser
	answers   *json.Decoder
	stderr    bytes.Buffer
}

func startWorker(ctx context.Context, contender, address string) (*worker, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	w := &worker{contender: contender, cmd: exec.CommandContext(ctx, self, workerCommand, contender, address)}
	w.cmd.Stderr = &w.stderr
	w.orders, err = w.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	answers, err := w.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w.answers = json.NewDecoder(answers)
	if err := w.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a worker: %w", err)
	}
	return w, nil
}

// do gives an order and waits for the answer, but not for longer than the order's limit: then
// the worker is killed.
func (w *worker) do(o order) (answer, error) {
	limit := o.limit()
	killed := time.AfterFunc(limit, func() { _ = w.cmd.Process.Kill() })
	var a answer
	err := json.NewEncoder(w.orders).Encode(o)
	if err == nil {
		err = w.answers.Decode(&a)
	}
	switch {
	case !killed.Stop():
		return answer{}, fmt.Errorf("%w: no answer within %v", errHung, limit.Round(time.Second))
	case err != nil:
		w.stop() // so that stderr is complete
		return answer{}, fmt.Errorf("worker: %w: %s", err, bytes.TrimSpace(w.stderr.Bytes()))
	case a.Error != "":
		return answer{}, errors.New(a.Error)
	}
	return a, nil
}

// stop ends the worker, which has nothing left to do; twice does no harm.
func (w *worker) stop() {
	_ = w.orders.Close()
	killed := time.AfterFunc(patience, func() { _ = w.cmd.Process.Kill() })
	defer killed.Stop()
	_ = w.cmd.Wait() // its results are in: how it ends is of no interest
}
