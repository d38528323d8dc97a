package main

import (
	"crypto/tls"
	"fmt"
	"io"
	"os"

	"github.com/spf13/pflag"

	"github.com/kvd-io/kvd/client"
)

// credentials are the flags that say who the caller is, and who the nodes must be.
type credentials struct {
	tls        bool
	files      client.TLSFiles
	requireTLS bool
	plainReads bool

	tokenFile  string
	token      string // of the environment
	plainToken bool

	loaded *tls.Config // by load
}

func (c *credentials) addFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&c.tls, "tls", os.Getenv("KVD_TLS") == "1", "use TLS, with the system's authorities (KVD_TLS=1)")
	fs.StringVar(&c.files.CA, "ca", os.Getenv("KVD_CA"), "use TLS, with the authorities in this PEM file (KVD_CA)")
	fs.StringVar(&c.files.Cert, "cert", os.Getenv("KVD_CERT"), "use TLS, with this certificate of one's own (KVD_CERT)")
	fs.StringVar(&c.files.Key, "key", os.Getenv("KVD_KEY"), "key of --cert (KVD_KEY)")
	fs.StringVar(&c.files.ServerName, "server-name", os.Getenv("KVD_SERVER_NAME"), "name that the nodes' certificates are for, where it is not the address (KVD_SERVER_NAME)")
	fs.BoolVar(&c.requireTLS, "require-tls", false, "refuse to work, and to read, without TLS")
	fs.BoolVar(&c.plainReads, "allow-plaintext-reads", false, "with --require-tls: read by RDMA and TCP all the same")
	fs.StringVar(&c.tokenFile, "token-file", os.Getenv("KVD_TOKEN_FILE"), "file with the token (KVD_TOKEN_FILE; KVD_TOKEN holds the token itself)")
	fs.BoolVar(&c.plainToken, "allow-plaintext-token", false, "send the token to other hosts without TLS")
	c.token = os.Getenv("KVD_TOKEN")
}

// load reads the files of TLS, if there is to be any. A flag for the token's file wins over
// the environment's token.
func (c *credentials) load(warn io.Writer) error {
	if c.tokenFile != "" {
		c.token = ""
	}
	for _, file := range []string{c.tokenFile, c.files.Key} {
		if why := client.OpenSecret(file); file != "" && why != "" {
			_, _ = fmt.Fprintln(warn, "kvctl: warning:", why)
		}
	}
	if !c.tls && c.files == (client.TLSFiles{}) {
		if c.requireTLS {
			return usagef("--require-tls without TLS: want --tls or --ca as well")
		}
		return nil
	}
	var err error
	c.loaded, err = client.LoadTLS(c.files)
	return err
}

func (c *credentials) apply(cfg *client.Config) {
	cfg.TLS, cfg.RequireTLS, cfg.AllowPlaintextReads = c.loaded, c.requireTLS, c.plainReads
	cfg.Token, cfg.TokenFile, cfg.AllowPlaintextToken = c.token, c.tokenFile, c.plainToken
}
