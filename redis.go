package redislock

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/caddy-redis-lock/caddy-redis-lock/lock"
)

const defaultAddress = "127.0.0.1:6379"

// Values of [Redis.Mode]; one server if empty.
const (
	clusterMode  = "cluster"
	sentinelMode = "sentinel"
	quorumMode   = "quorum"
)

var redisModes = []string{clusterMode, sentinelMode, quorumMode}

// Redis says which Redis the locks live in. The placeholders `{env.*}` and `{file.*}` are
// resolved in all texts when Caddy loads its configuration.
type Redis struct {
	// How the servers belong together: one server (the default), `cluster` (a Redis Cluster),
	// `sentinel` (a master and replicas that Redis Sentinels watch), or `quorum` (three or five
	// servers that know nothing of one another: a lock is had by a majority of them, so that one
	// may fail). Locks of a quorum have no fence, and the line is one per Caddy.
	Mode string `json:"mode,omitempty"`

	// The server; some nodes of the cluster; the sentinels; or all servers of the quorum. Each is `host:port`,
	// `redis://[user:password@]host[:port][/db]`, the same with `rediss://` for TLS, or
	// `unix://[user:password@]/path[?db=n]`. Special characters of a password in a URL are
	// percent-encoded.
	Address []string `json:"address,omitempty"`

	// User and password of the servers. Default: none.
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`

	// Number of the database. Default: 0, which is all that a cluster has.
	DB int `json:"db,omitempty"`

	// Name under which the sentinels know the master.
	MasterName string `json:"master_name,omitempty"`

	// User and password of the sentinels. Default: none.
	SentinelUsername string `json:"sentinel_username,omitempty"`
	SentinelPassword string `json:"sentinel_password,omitempty"`

	// Speak TLS, as with `rediss://`. Every other tls option implies it.
	TLS bool `json:"tls,omitempty"`

	// Name that the servers' certificates must have. Default: the host of the address.
	TLSServerName string `json:"tls_server_name,omitempty"`

	// PEM files with the CA certificates to trust. Default: the system's.
	TLSTrustedCACerts []string `json:"tls_trusted_ca_certs,omitempty"`

	// PEM files of the certificate to show to the servers, and of its key.
	TLSClientAuth []string `json:"tls_client_auth,omitempty"`

	// Trust any certificate: whoever is in between can read and take locks.
	TLSInsecureSkipVerify bool `json:"tls_insecure_skip_verify,omitempty"`

	// Bounds connecting. Default: three quarters of `op_timeout`.
	DialTimeout caddy.Duration `json:"dial_timeout,omitempty"`

	// Bounds one operation, connecting included. Without an answer by then Redis counts as
	// unavailable. Default: 2s.
	OpTimeout caddy.Duration `json:"op_timeout,omitempty"`

	// How many connections a server gets at most. Default: 10 for each CPU.
	PoolSize int `json:"pool_size,omitempty"`
}

// check refuses what can be told before placeholders are resolved: what is in braces may be
// anything.
func (r *Redis) check() error {
	sentinel := r.Mode == sentinelMode
	for _, check := range []struct {
		wrong bool
		err   error
	}{
		{r.Mode != "" && !slices.Contains(redisModes, r.Mode), fmt.Errorf("mode: %q is neither %s", r.Mode, strings.Join(redisModes, " nor "))},
		{r.Mode == "" && len(r.Address) != 1, fmt.Errorf("%d addresses; give one, or write before them what they are: %s", len(r.Address), strings.Join(redisModes, " or "))},
		{r.Mode == quorumMode && (len(r.Address) < 3 || len(r.Address)%2 == 0), fmt.Errorf("%d addresses; a quorum needs an odd number of servers, 3 or 5: a majority of them must agree", len(r.Address))},
		{len(r.Address) == 0, fmt.Errorf("%s: no address", r.Mode)},
		{sentinel && r.MasterName == "", fmt.Errorf("master_name: missing; sentinels know masters by name, such as mymaster")},
		{!sentinel && r.MasterName != "", fmt.Errorf("master_name: only sentinels know names; write redis %s", sentinelMode)},
		{!sentinel && r.SentinelUsername != "", fmt.Errorf("sentinel_username: belongs to redis %s", sentinelMode)},
		{!sentinel && r.SentinelPassword != "", fmt.Errorf("sentinel_password: belongs to redis %s", sentinelMode)},
		{r.DB < 0, fmt.Errorf("db: %d is negative", r.DB)},
		{r.Mode == clusterMode && r.DB != 0, fmt.Errorf("db: %d; a cluster has database 0 only", r.DB)},
		{len(r.TLSClientAuth) != 0 && len(r.TLSClientAuth) != 2, fmt.Errorf("tls_client_auth: takes a certificate and its key, got %d files", len(r.TLSClientAuth))},
		{r.DialTimeout < 0, fmt.Errorf("dial_timeout: %v is negative", time.Duration(r.DialTimeout))},
		{r.OpTimeout < 0, fmt.Errorf("op_timeout: %v is negative", time.Duration(r.OpTimeout))},
		{r.dialTimeout() >= r.opTimeout(), fmt.Errorf("dial_timeout: %v is not shorter than op_timeout, %v, which bounds connecting and asking together", r.dialTimeout(), r.opTimeout())},
		{r.SentinelUsername != "" && r.SentinelPassword == "", errors.New("sentinel_username: without sentinel_password it would be ignored")},
		{r.PoolSize < 0, fmt.Errorf("pool_size: %d is negative", r.PoolSize)},
	} {
		if check.wrong {
			return check.err
		}
	}
	seen := make(map[string]bool)
	for _, address := range r.Address {
		if strings.Contains(address, "{") {
			continue
		}
		a, err := parseAddress(address)
		if err != nil {
			return err
		}
		if seen[a.Addr] {
			return errors.New("an address is given twice")
		}
		seen[a.Addr] = true
		if err := r.checkAddress(a); err != nil {
			return err
		}
	}
	return nil
}

// checkAddress refuses what an address says in contradiction to the options beside it.
func (r *Redis) checkAddress(a *redis.Options) error {
	unix := a.Network == "unix"
	switch {
	case unix && (r.Mode == clusterMode || r.Mode == sentinelMode || r.wantsTLS()):
		return errors.New("address is a unix socket, which only a server of its own without TLS may have")
	case r.Mode == sentinelMode && (a.Username != "" || a.Password != "" || a.DB != 0):
		return errors.New("address: a sentinel's has no user, password or database; write sentinel_username, sentinel_password for it, and username, password, db for the servers")
	case r.Mode == clusterMode && a.DB != 0:
		return errors.New("address has a database; a cluster has database 0 only")
	case r.Username+a.Username != "" && r.Password+a.Password == "":
		return errors.New("username: without a password it would be ignored; a user without one takes any")
	case r.Username != "" && a.Username != "":
		return errors.New("username: the address has one, too")
	case r.Password != "" && a.Password != "":
		return errors.New("password: the address has one, too")
	case r.DB != 0 && a.DB != 0:
		return errors.New("db: the address has one, too")
	}
	return nil
}

func (r *Redis) wantsTLS() bool {
	return r.TLS || r.TLSServerName != "" || len(r.TLSTrustedCACerts) > 0 || len(r.TLSClientAuth) > 0 || r.TLSInsecureSkipVerify
}

func (r *Redis) opTimeout() time.Duration {
	if r.OpTimeout == 0 {
		return lock.DefaultOpTimeout
	}
	return time.Duration(r.OpTimeout)
}

// dialTimeout ends before the operation does: only then it is known that nothing was sent.
func (r *Redis) dialTimeout() time.Duration {
	if r.DialTimeout == 0 {
		return r.opTimeout() * 3 / 4
	}
	return time.Duration(r.DialTimeout)
}

// resolve returns r without placeholders.
func (r *Redis) resolve() (*Redis, error) {
	resolved := *r
	resolved.Address = slices.Clone(r.Address)
	resolved.TLSTrustedCACerts = slices.Clone(r.TLSTrustedCACerts)
	resolved.TLSClientAuth = slices.Clone(r.TLSClientAuth)
	texts := map[string][]*string{
		"address": pointers(resolved.Address), "username": {&resolved.Username}, "password": {&resolved.Password},
		"master_name": {&resolved.MasterName}, "sentinel_username": {&resolved.SentinelUsername},
		"sentinel_password": {&resolved.SentinelPassword}, "tls_server_name": {&resolved.TLSServerName},
		"tls_trusted_ca_certs": pointers(resolved.TLSTrustedCACerts), "tls_client_auth": pointers(resolved.TLSClientAuth),
	}
	replacer := caddy.NewReplacer()
	for option, values := range texts {
		for _, value := range values {
			if *value == "" {
				continue
			}
			text, err := replacer.ReplaceOrErr(*value, true, true)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", option, placeholderError(err))
			}
			*value = text
		}
	}
	return &resolved, resolved.check()
}

func pointers(values []string) (all []*string) {
	for i := range values {
		all = append(all, &values[i])
	}
	return all
}

// placeholderError names only placeholders that are ours: others may be part of a password.
func placeholderError(err error) error {
	if text := err.Error(); strings.Contains(text, "{env.") || strings.Contains(text, "{file.") {
		return err
	}
	return errors.New(`has a placeholder that is neither {env.*} nor {file.*}; write a literal brace as \{`)
}

// clients returns the options of r's client, or of one for each server of a quorum. r has no
// placeholders.
func (r *Redis) clients() (all []*redis.UniversalOptions, err error) {
	each := []*Redis{r}
	if r.Mode == quorumMode {
		each = nil
		for _, address := range r.Address {
			node := *r
			node.Mode, node.Address = "", []string{address}
			each = append(each, &node)
		}
	}
	for _, r := range each {
		options, err := r.clientOptions()
		if err != nil {
			return nil, err
		}
		all = append(all, options)
	}
	return all, nil
}

func (r *Redis) clientOptions() (*redis.UniversalOptions, error) {
	o := &redis.UniversalOptions{
		Username:         r.Username,
		Password:         r.Password,
		DB:               r.DB,
		MasterName:       r.MasterName,
		SentinelUsername: r.SentinelUsername,
		SentinelPassword: r.SentinelPassword,
		IsClusterMode:    r.Mode == clusterMode,
		DialTimeout:      r.dialTimeout(),
		PoolSize:         r.PoolSize,
		PipelinePoolSize: -1, // none beside it
		// What ends an operation is its own deadline.
		ReadTimeout:  r.opTimeout(),
		WriteTimeout: r.opTimeout(),
		PoolTimeout:  r.opTimeout(),
		// A name that leads to another server by now is followed at the latest then.
		ConnMaxLifetime: maxConnectionAge,
		// The Store repeats by itself what is worth repeating; see lock.NewGetSet.
		MaxRetries:               -1,
		DialerRetries:            1,
		ContextTimeoutEnabled:    true,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	secure := 0
	for _, address := range r.Address {
		a, err := parseAddress(address)
		if err != nil {
			return nil, err
		}
		if a.TLSConfig != nil {
			secure++
		}
		for _, part := range []struct{ ours, theirs *string }{{&o.Username, &a.Username}, {&o.Password, &a.Password}} {
			if *part.ours != "" && *part.theirs != "" && *part.ours != *part.theirs {
				return nil, errors.New("addresses of one cluster differ in user or password")
			}
			*part.ours = cmp.Or(*part.ours, *part.theirs)
		}
		o.DB = cmp.Or(o.DB, a.DB)
		o.Addrs = append(o.Addrs, a.Addr)
	}
	if secure > 0 && secure < len(r.Address) && !r.wantsTLS() {
		return nil, errors.New("addresses differ in their scheme: some are rediss://")
	}
	if secure > 0 || r.wantsTLS() {
		config, err := r.tlsConfig()
		if err != nil {
			return nil, err
		}
		o.TLSConfig = config
	}
	return o, nil
}

// maxConnectionAge is short enough for a move to another server behind the same name, and long
// enough for connecting to cost nothing. Only tests change it.
var maxConnectionAge = time.Minute

func (r *Redis) tlsConfig() (*tls.Config, error) {
	config := &tls.Config{ServerName: r.TLSServerName, InsecureSkipVerify: r.TLSInsecureSkipVerify}
	for _, file := range r.TLSTrustedCACerts {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("tls_trusted_ca_certs: %w", err)
		}
		if config.RootCAs == nil {
			config.RootCAs = x509.NewCertPool()
		}
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("tls_trusted_ca_certs: %s has no certificate in PEM form", file)
		}
	}
	if len(r.TLSClientAuth) > 0 {
		certificate, err := tls.LoadX509KeyPair(r.TLSClientAuth[0], r.TLSClientAuth[1])
		if err != nil {
			return nil, fmt.Errorf("tls_client_auth: %w", err)
		}
		config.Certificates = []tls.Certificate{certificate}
	}
	return config, nil
}

// parseAddress never puts the address into its errors when it may have a password in it.
func parseAddress(address string) (*redis.Options, error) {
	const want = "want host:port, or a redis://, rediss:// or unix:// URL"
	scheme, _, isURL := strings.Cut(address, "://")
	if !isURL {
		host, port, err := net.SplitHostPort(address)
		if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host == "" {
			if strings.Contains(address, "@") {
				return nil, errors.New("address is not valid: " + want)
			}
			return nil, fmt.Errorf("address %q is not valid: %s", address, want)
		}
		return &redis.Options{Network: "tcp", Addr: address}, nil
	}
	switch scheme {
	case "redis", "rediss", "unix":
	default:
		return nil, fmt.Errorf("address has the unknown scheme %q: %s", scheme, want)
	}
	u, err := url.Parse(address)
	if err != nil || scheme != "unix" && strings.Contains(u.Path+u.RawQuery, "@") || u.Fragment != "" {
		return nil, fmt.Errorf("address is not a valid %s:// URL; percent-encode special characters of the password", scheme)
	}
	for option := range u.Query() {
		if option != "db" {
			return nil, fmt.Errorf("address has the unknown URL option %q; only db is known", option)
		}
	}
	if scheme != "unix" && u.Hostname() == "" {
		return nil, fmt.Errorf("address has no host: %s", want)
	}
	if scheme == "unix" && u.Hostname() != "" {
		return nil, errors.New("address is a unix:// URL whose path is not absolute; write unix:/// with three slashes")
	}
	options, err := redis.ParseURL(address)
	if err != nil {
		return nil, fmt.Errorf("address: %w", err)
	}
	return options, nil
}
