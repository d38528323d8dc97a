//go:build !linux

package ibv

func newEventFD(int, string) (*eventFD, error) { return nil, noShim }

func ifnameOf(int) string { return "" }

func ifindexOf(string) int { return 0 }
