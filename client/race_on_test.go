//go:build race

package client

const raceEnabled = true // sync.Pool drops at random then
