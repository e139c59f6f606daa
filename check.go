package redislock

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

func checkNames(names []string) error {
	if slices.Contains(names, "") {
		return errors.New("empty: everybody would share one lock by accident; give it a name")
	}
	for i, name := range names {
		if i < len(names)-1 && !varies(name) {
			return fmt.Errorf("%q always resolves, so that what follows never counts; put it last, or quote a name that has spaces in it", name)
		}
	}
	_, err := newFields(names)
	return err
}

// templates are all that is resolved for a request.
func (h *Handler) templates() []string {
	if h.Dedupe == nil {
		return h.Name
	}
	return append(slices.Clone(h.Name), h.Dedupe.ID)
}

func checkOneOf(values ...string) func(string) error {
	return func(value string) error {
		if !slices.Contains(values, value) {
			return fmt.Errorf("%q is neither %s", value, strings.Join(values, " nor "))
		}
		return nil
	}
}

func checkPositive[T int | time.Duration](value T) error {
	if value <= 0 {
		return fmt.Errorf("%v is not more than 0", value)
	}
	return nil
}

func checkNotEmpty(value string) error { return checkNoneEmpty([]string{value}) }

func checkNoneEmpty(values []string) error {
	if slices.Contains(values, "") {
		return errors.New("empty; leave the option out if there is nothing to say")
	}
	return nil
}

func checkMethods(methods []string) error {
	for i, method := range methods {
		switch {
		case method == unsafe:
			if len(methods) > 1 {
				return fmt.Errorf("%s stands for a list of methods; it cannot be part of one", unsafe)
			}
		case method == "" || strings.ContainsFunc(method, func(c rune) bool { return (c < 'A' || c > 'Z') && c != '-' }):
			return fmt.Errorf("%q is not a method: methods are written in upper case, or all of them as %s", method, unsafe)
		case slices.Contains(methods[:i], method):
			return fmt.Errorf("%s is given twice", method)
		}
	}
	return nil
}

func checkStatus(status int) error {
	if status < 400 || status > 599 {
		return fmt.Errorf("%d is not an error status from 400 to 599", status)
	}
	return nil
}

func checkNotNegative[T int | int64 | time.Duration](value T) error {
	if value < 0 {
		return fmt.Errorf("%v is negative; 0 means none", value)
	}
	return nil
}

func (h *Handler) checkFenceHeader() error {
	if h.FenceHeader == "" {
		return nil
	}
	if h.isQuorum() {
		return fmt.Errorf("a %s has no fencing tokens; leave it out, or use one server, a %s or a %s", quorumMode, sentinelMode, clusterMode)
	}
	return checkFenceHeader(h.FenceHeader)
}

// checkBuffer works before and after the defaults are set.
func (h *Handler) checkBuffer() error {
	switch fields, _ := newFields(h.templates()); {
	case h.Buffer == nil:
		return nil
	case *h.Buffer == 0 && !fields.none():
		return errors.New("0: a name or an id asks for the body, which must be buffered for that; leave buffer 0 out")
	}
	return checkNotNegative(*h.Buffer)
}

func (h *Handler) checkDedupe() error {
	switch {
	case h.Dedupe == nil:
		return nil
	case h.isQuorum():
		return fmt.Errorf("a %s does not tell deliveries apart; leave it out, or use one server, a %s or a %s", quorumMode, sentinelMode, clusterMode)
	}
	return h.Dedupe.check()
}

func (d *Dedupe) check() error {
	if d.ID == "" {
		return errors.New("has no id; give it what the sender calls a delivery, such as {path}:{header.X-GitHub-Delivery}")
	}
	if _, err := newFields([]string{d.ID}); err != nil {
		return err
	}
	if !varies(d.ID) {
		return fmt.Errorf("%q is the same for all deliveries, so that only the first would be handled; it needs a placeholder, such as {header.X-GitHub-Delivery}", d.ID)
	}
	return checkPositive(time.Duration(d.Window))
}

func checkDisplaced(status int) error {
	if status < 200 || status > 599 {
		return fmt.Errorf("%d is not a status from 200 to 599", status)
	}
	return nil
}

// checkSupersede works before and after the defaults are set.
func (h *Handler) checkSupersede() error {
	switch {
	case h.Supersede == 0:
		return nil
	case h.isQuorum():
		return fmt.Errorf("a %s has no line; leave it out, or use one server, a %s or a %s", quorumMode, sentinelMode, clusterMode)
	case h.Wait <= 0:
		return errors.New("nobody waits, so that nobody could be displaced; set wait")
	case h.Queue != nil && *h.Queue == 0:
		return errors.New("nobody waits with queue 0; leave that out")
	case h.Buffer != nil && *h.Buffer == 0:
		return errors.New("a request whose body is not buffered cannot stay in line when its sender hangs up; leave buffer 0 out")
	case h.OnDisconnect != "" && h.OnDisconnect != stayRun:
		return fmt.Errorf("on_disconnect %s would lose the newest request when its sender hangs up; leave it out, or write on_disconnect %s", h.OnDisconnect, stayRun)
	}
	return checkDisplaced(h.Supersede)
}

func (h *Handler) isQuorum() bool { return h.Redis != nil && h.Redis.Mode == quorumMode }

func (h *Handler) checkProtocol() error {
	switch {
	case h.Memory && h.Protocol != "":
		return errMemoryAndRedis
	case h.isQuorum() && h.Protocol == tokenProtocol:
		return fmt.Errorf("a %s speaks %s only", quorumMode, getsetProtocol)
	case h.Memory || h.Protocol == "": // not yet, or not at all
		return nil
	}
	return checkOneOf(getsetProtocol, tokenProtocol)(h.Protocol)
}

func (h *Handler) checkRedis() error {
	if h.Redis == nil {
		return nil
	}
	return h.Redis.check()
}

func (h *Handler) checkMemory() error {
	if h.Memory && h.Redis != nil {
		return errMemoryAndRedis
	}
	return nil
}

var errMemoryAndRedis = errors.New("locks live in memory or in redis, where they have a protocol; give one of the two")
