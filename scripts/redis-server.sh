#!/bin/sh
# Makes sure that redis-server is there for the tests: they start it themselves.
set -eu

if command -v redis-server >/dev/null 2>&1; then
	exit 0
fi

sudo=
if [ "$(id -u)" -ne 0 ] && command -v sudo >/dev/null 2>&1; then
	sudo=sudo
fi

echo "redis-server is missing: installing it" >&2
if command -v apt-get >/dev/null 2>&1; then
	$sudo apt-get update -qq
	# The package starts a server of its own, which the tests do not need.
	DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends redis-server >/dev/null
elif command -v apk >/dev/null 2>&1; then
	$sudo apk add --quiet redis
elif command -v brew >/dev/null 2>&1; then
	brew install --quiet redis
elif command -v dnf >/dev/null 2>&1; then
	# Newer releases ship valkey, whose compatibility package brings the name redis-server.
	$sudo dnf install -y -q redis || $sudo dnf install -y -q valkey-compat-redis
fi

if ! command -v redis-server >/dev/null 2>&1; then
	cat >&2 <<-'MESSAGE'
		redis-server could not be installed: the tests need it in the PATH.
		Install Redis 5 or newer (https://redis.io/docs/latest/operate/oss_and_stack/install/)
		and run the tests again.
	MESSAGE
	exit 1
fi
