package main

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// monotonic is the time since some moment that is the same for all processes of the machine,
// so that what several of them saw can be put in one order. The wall clock may step.
func monotonic() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(fmt.Sprintf("the monotonic clock: %v", err)) // every system has it
	}
	return time.Duration(now.Nano())
}

// cpuTime is the CPU time that this process has used so far.
func cpuTime() (time.Duration, error) {
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		return 0, fmt.Errorf("getrusage: %w", err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()), nil
}
