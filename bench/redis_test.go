package main

import "testing"

func TestSentByClient(t *testing.T) {
	for line, want := range map[string]bool{
		`+1700000000.000000 [0 127.0.0.1:50000] "evalsha" "abc" "1" "k"`: true,
		`+1700000000.000000 [0 127.0.0.1:50000] "SET" "k" "] [0 lua] "`:  true,
		`+1700000000.000000 [0 unix:/tmp/redis] "ping"`:                  true,
		`+1700000000.000000 [0 lua] "set" "k" "v"`:                       false,
		`+1700000000.000000 [0 127.0.0.1:50000] "hello" "3"`:             false,
		`+1700000000.000000 [0 127.0.0.1:50000] "CLIENT" "TRACKING"`:     false,
		`+OK`: false,
	} {
		if got := sentByClient(line); got != want {
			t.Errorf("%s: %v, want %v", line, got, want)
		}
	}
}
