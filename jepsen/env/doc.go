// Package env is the place where a run of jepsen happens: kvd processes and the hosts they
// run on. With root every host is a network namespace with an address of its own, joined by
// veth pairs and a bridge (which has a namespace too, so the machine's own network is not
// touched); without, all share loopback and only processes can be made to fail.
//
// Everything that is made here ends with Close. Processes also end when this one does,
// however it ends (PDEATHSIG); namespaces and cgroups that a killed run left behind are
// removed by the next one.
package env
