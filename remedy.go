package redislock

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"strings"
	"syscall"
)

// remedy says what a person can do about an error of Redis, in the words of the configuration;
// empty if nothing better than the error itself can be said.
func remedy(err error) string {
	text := err.Error()
	for _, known := range remedies {
		if known.is(err, text) {
			return known.remedy
		}
	}
	return ""
}

// remedies are tried in order: what is more special comes first.
var remedies = []struct {
	is     func(err error, text string) bool
	remedy string
}{
	{says("WRONGPASS", "invalid password", "invalid username-password"), "the user or the password is wrong: check username and password (of the sentinels: sentinel_username and sentinel_password)"},
	{says("NOAUTH", "Authentication required"), "the server wants a password: set password, and username if it has users (for sentinels: sentinel_password)"},
	{says("called without any password configured"), "the server has no password: remove password"},
	{says("NOPERM", "ACL failure", "can't run this command", "can't access at least one of the keys"), "the user lacks a right: allow it the commands and keys that the README lists"},
	{says("WRONGTYPE"), "a key that belongs to the lock holds something else: delete it if no other program needs it"},
	{says("DENIED"), "the server is in protected mode, so it takes connections from its own machine only: give it a password (requirepass) and set password, or bind it to an internal address"},
	{says("READONLY"), "the server is a replica: give the address of its master, or write redis " + sentinelMode},
	{says("NOREPLICAS"), "the master has fewer replicas than its min-replicas-to-write"},
	{says("MASTERDOWN", "LOADING"), "the server is starting, or has lost its master: this passes by itself"},
	{says("MISCONF"), "the server cannot write its snapshot to disk and refuses writes: free its disk, or turn off stop-writes-on-bgsave-error"},
	{says("OOM "), "the server's memory is full: raise its maxmemory"},
	{says("BUSY "), "a script keeps the server busy: run SCRIPT KILL on it"},
	{says("max number of clients"), "the server has too many connections: raise its maxclients, or lower pool_size"},
	{says("CLUSTERDOWN"), "the cluster lacks a master for some keys: check its nodes with CLUSTER NODES"},
	{says("MOVED ", "CROSSSLOT"), "the server is a node of a cluster: write redis " + clusterMode},
	{says("cluster support disabled"), "the server is not part of a cluster: write redis without " + clusterMode},
	{says("DB index is out of range", "SELECT is not allowed"), "the server does not have this database: check db"},
	{says("No such master", "redis: nil"), "no sentinel knows this master: check master_name"},
	{says("sentinels specified in configuration are unreachable"), "no sentinel answers: check the addresses, which must be those of sentinels (port 26379 mostly) and not of servers, and sentinel_password"},
	{says("unknown command"), "this is no server that runs scripts; if it is a sentinel, write redis " + sentinelMode},
	{isA[x509.UnknownAuthorityError], "the server's certificate is of a CA that is not trusted: set tls_trusted_ca_certs to the CA's certificate"},
	{isA[x509.HostnameError], "the server's certificate is for another name: set tls_server_name to one that it has"},
	{isA[x509.CertificateInvalidError], "the server's certificate is not valid (any more): renew it"},
	{says("certificate required", "bad certificate", "unknown certificate", "handshake failure"), "the server does not take our certificate: set tls_client_auth to one that it trusts, with its key"},
	{isA[tls.RecordHeaderError], "this port does not speak TLS: remove tls, or write redis:// for rediss://"},
	{says("can't parse", "invalid reply", "unexpected reply", "unexpected response"), "this is not the port of a Redis server: check the address"},
	{isA[*net.DNSError], "the name of the host is unknown: check the address"},
	{is(syscall.ECONNREFUSED), "nothing listens there: check the address, and that the server runs"},
	{is(syscall.ENOENT), "there is no such socket: check the address, and that the server runs"},
	{is(syscall.EACCES), "the socket's permissions keep Caddy out: put its user into the socket's group"},
	{says("EOF", "connection reset", "broken pipe"), "the server closed the connection: if it wants TLS, write tls or rediss://; if it wants a certificate from its clients, set tls_client_auth"},
	{says("connecting: context deadline exceeded"), "the server does not answer to TLS: if this port does not speak it, remove tls, or write redis:// for rediss://"},
	{says("timeout", "deadline exceeded"), "the server does not answer in time: check the address and firewalls, or raise op_timeout"},
}

func says(phrases ...string) func(error, string) bool {
	return func(_ error, text string) bool {
		for _, phrase := range phrases {
			if strings.Contains(text, phrase) {
				return true
			}
		}
		return false
	}
}

func isA[T error](err error, _ string) bool {
	_, ok := errors.AsType[T](err)
	return ok
}

func is(target error) func(error, string) bool {
	return func(err error, _ string) bool { return errors.Is(err, target) }
}
