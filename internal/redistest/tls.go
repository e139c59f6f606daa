package redistest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Certificates are files in PEM format, made for one test.
type Certificates struct {
	CA        string  // signed all the others
	OtherCA   string  // signed none of them
	Server    KeyPair // for 127.0.0.1 and localhost
	OtherHost KeyPair // a server's, for redis.example only
	Client    KeyPair
}

// A KeyPair is a certificate and its private key.
type KeyPair struct{ Cert, Key string }

// NewCertificates makes new ones.
func NewCertificates(t testing.TB) *Certificates {
	t.Helper()
	dir := t.TempDir()
	authority, other := newAuthority(t, dir, "ca"), newAuthority(t, dir, "other-ca")
	return &Certificates{
		CA:        authority.file,
		OtherCA:   other.file,
		Server:    authority.issue(t, "server", x509.ExtKeyUsageServerAuth, "127.0.0.1", "localhost"),
		OtherHost: authority.issue(t, "other-host", x509.ExtKeyUsageServerAuth, "redis.example"),
		Client:    authority.issue(t, "client", x509.ExtKeyUsageClientAuth),
	}
}

// StartTLS starts a server that speaks TLS only. As Redis does by default, it wants a client
// certificate that the CA has signed; "--tls-auth-clients", "no" or "optional" changes that, as
// "--tls-cert-file" and "--tls-key-file" change the server's own.
func StartTLS(t testing.TB, certs *Certificates, args ...string) *Server {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(certs.Client.Cert, certs.Client.Key)
	if err != nil {
		t.Fatal(err)
	}
	addr := FreeAddr(t)
	return launch(t, &redis.Options{Addr: addr, TLSConfig: &tls.Config{
		Certificates:       []tls.Certificate{pair},
		InsecureSkipVerify: true, // the tests' own eyes see a server with any certificate
	}}, plain(addr, append([]string{
		"--port", "0", "--tls-port", port(addr), "--tls-ca-cert-file", certs.CA,
		"--tls-cert-file", certs.Server.Cert, "--tls-key-file", certs.Server.Key,
	}, args...))...)
}

type authority struct {
	dir, file   string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t testing.TB, dir, name string) *authority {
	t.Helper()
	a := &authority{dir: dir, key: newKey(t), certificate: &x509.Certificate{
		BasicConstraintsValid: true,
		IsCA:                  true,
		KeyUsage:              x509.KeyUsageCertSign,
	}}
	a.file = a.sign(t, name, a.certificate, a.key)
	return a
}

// issue makes a certificate for hosts, which are names or addresses.
func (a *authority) issue(t testing.TB, name string, usage x509.ExtKeyUsage, hosts ...string) KeyPair {
	t.Helper()
	key, certificate := newKey(t), &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{usage}}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			certificate.IPAddresses = append(certificate.IPAddresses, ip)
		} else {
			certificate.DNSNames = append(certificate.DNSNames, host)
		}
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return KeyPair{a.sign(t, name, certificate, key), a.write(t, name+".key", "PRIVATE KEY", der)}
}

func (a *authority) sign(t testing.TB, name string, certificate *x509.Certificate, key *ecdsa.PrivateKey) string {
	t.Helper()
	certificate.Subject = pkix.Name{CommonName: name}
	certificate.SerialNumber = big.NewInt(time.Now().UnixNano())
	certificate.NotBefore = time.Now().Add(-time.Hour)
	certificate.NotAfter = time.Now().Add(time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, certificate, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return a.write(t, name+".crt", "CERTIFICATE", der)
}

func (a *authority) write(t testing.TB, name, kind string, der []byte) string {
	t.Helper()
	path := filepath.Join(a.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}
