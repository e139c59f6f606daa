package redistest

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"testing"

	"github.com/redis/go-redis/v9"
)

// connect asks the server for a PONG as a client that trusts the CA in a file.
func connect(t *testing.T, s *Server, ca string, client *KeyPair) error {
	t.Helper()
	pem, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		t.Fatalf("%s has no certificate", ca)
	}
	if client != nil {
		pair, err := tls.LoadX509KeyPair(client.Cert, client.Key)
		if err != nil {
			t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	c := redis.NewClient(&redis.Options{Addr: s.Addr, TLSConfig: config, MaxRetries: -1, DialerRetries: 1})
	defer c.Close()
	return c.Ping(t.Context()).Err()
}

func TestStartTLS(t *testing.T) {
	t.Parallel()
	certs := NewCertificates(t)
	strict := StartTLS(t, certs)
	open := StartTLS(t, certs, "--tls-auth-clients", "no")
	elsewhere := StartTLS(t, certs, "--tls-cert-file", certs.OtherHost.Cert, "--tls-key-file", certs.OtherHost.Key)
	for _, s := range []*Server{strict, open, elsewhere} {
		if err := s.Client.Set(t.Context(), "a", 1, 0).Err(); err != nil {
			t.Errorf("the server's own client: %v", err)
		}
	}
	if err := connect(t, strict, certs.CA, &certs.Client); err != nil {
		t.Errorf("with a client certificate: %v", err)
	}
	if err := connect(t, strict, certs.CA, nil); err == nil {
		t.Error("let in without a client certificate")
	}
	if err := connect(t, open, certs.CA, nil); err != nil {
		t.Errorf("where none is wanted, without a client certificate: %v", err)
	}
	if _, ok := errors.AsType[x509.UnknownAuthorityError](connect(t, open, certs.OtherCA, nil)); !ok {
		t.Error("the other CA vouches for the server")
	}
	if _, ok := errors.AsType[x509.HostnameError](connect(t, elsewhere, certs.CA, &certs.Client)); !ok {
		t.Error("the other host's certificate is good for 127.0.0.1")
	}
	plain := redis.NewClient(&redis.Options{Addr: open.Addr, MaxRetries: -1, DialerRetries: 1})
	defer plain.Close()
	if err := plain.Ping(t.Context()).Err(); err == nil {
		t.Error("the server also speaks without TLS")
	}
}
