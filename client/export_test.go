package client

import "testing"

// StartForTest starts nodes in the test and a client of them, for tests of what is built
// on this package. transport is TransportAuto, "fake" or TransportGRPC.
func StartForTest(t testing.TB, transport string) *Client {
	return start(t, fakeOptions{}, netOptions{sync: true}, func(c *Config) { c.Transport = transport }).c
}
