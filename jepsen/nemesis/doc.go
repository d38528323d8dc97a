// Package nemesis plans faults from a seed and makes them happen. plan.go is a pure function:
// the same seed gives the same plan. What a plan leaves open, such as who leads just now, is
// found out at run time and recorded. faults.go says for each fault how it is known to have
// happened: a fault that was ordered but not seen does not count.
package nemesis
