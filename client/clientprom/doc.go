// Package clientprom exports what a client counts to Prometheus. One-sided gets never
// reach a node's CPU, so the nodes' own metrics can not show them: which transport
// answers, how often a read had to be repeated or asked for over gRPC, and why, is
// known to clients alone.
//
//	registry.MustRegister(clientprom.Collector(c))
//
// A program with several clients tells them apart by a label of its own:
//
//	prometheus.WrapRegistererWith(prometheus.Labels{"namespace": "train"}, registry).MustRegister(clientprom.Collector(c))
package clientprom
