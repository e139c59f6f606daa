.PHONY: test vet fmt bench

# Everything that must be green. -race needs a C compiler (gcc or clang); -count=1, because the
# test cache does not see what goes into the caddy binary that internal/e2e builds.
test:
	./scripts/redis-server.sh
	CGO_ENABLED=1 go test -race -count=1 -timeout 30m ./...

vet:
	go vet ./...

fmt:
	gofmt -l -w .

# What a lock costs, beside others: some minutes. BENCH=-quick for a glance.
bench:
	./scripts/redis-server.sh
	cd bench && go run . -out . $(BENCH)
