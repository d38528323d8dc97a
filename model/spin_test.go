package main

import (
	"context"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const good = `
Full statespace search for:
	assertion violations	+
State-vector 148 byte, depth reached 107, errors: 0
  1789051 states, stored
 14695601 states, matched
  355.905	total actual memory usage
pan: elapsed time 20.2 seconds
`

const bad = `pan:1: assertion violated (getIndex>=getFloor) (at depth 53)
pan: wrote confirmedread.pml.trail
Warning: Search not completed
State-vector 148 byte, depth reached 53, errors: 1
       43 states, stored
  128.730	total actual memory usage
pan: elapsed time 0 seconds
`

func TestParse(t *testing.T) {
	r, err := parse(good)
	require.NoError(t, err)
	require.Equal(t, result{complete: true, states: 1789051, depth: 107, memoryMB: 355.905, took: 20200 * time.Millisecond}, r)
	r, err = parse(bad)
	require.NoError(t, err)
	require.Equal(t, "assertion violated (getIndex>=getFloor)", r.violation)
	require.False(t, r.complete)

	for name, text := range map[string]string{
		"nothing":          "",
		"errors, no words": regexp.MustCompile("(?m)^pan:1.*$").ReplaceAllString(bad, ""),
		"out of bounds":    regexp.MustCompile(`violated \(.*\) \(`).ReplaceAllString(bad, "violated - invalid array index ("),
		"deadlock":         regexp.MustCompile(`assertion .*\) \(`).ReplaceAllString(bad, "invalid end state ("),
		"no count":         regexp.MustCompile("(?m)^.*stored$").ReplaceAllString(good, ""),
	} {
		_, err := parse(text)
		require.Error(t, err, name)
	}
}

// What must come out and what must not.
func TestJudge(t *testing.T) {
	asIs, broken, sampled := check{name: "x"}, check{name: "x", broken: true}, check{name: "x", sample: true}
	clean, cut, found := result{complete: true}, result{}, result{violation: "assertion violated (a)"}
	require.NoError(t, clean.judge(asIs))
	require.Error(t, cut.judge(asIs))
	require.Error(t, found.judge(asIs))
	require.Error(t, clean.judge(broken))
	require.NoError(t, found.judge(broken))
	require.NoError(t, cut.judge(sampled))
	require.Error(t, found.judge(sampled))
}

// Every variant that the model knows is checked, and what is checked is in the model: a
// misspelt one would be the protocol as it is.
func TestVariants(t *testing.T) {
	text, err := os.ReadFile(modelFile)
	require.NoError(t, err)
	inModel := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^#(?:ifdef|ifndef|if|elif)\b.*$`).FindAllString(string(text), -1) {
		for _, word := range regexp.MustCompile(`[A-Z][A-Z_]{3,}`).FindAllString(m, -1) {
			inModel[word] = true
		}
	}
	checked := map[string]bool{}
	for _, c := range checks {
		for _, d := range c.defs {
			word := regexp.MustCompile(`^[A-Z_]+`).FindString(d)
			require.True(t, word == "N" || inModel[word], "%s: %s is not in %s", c.name, word, modelFile)
			checked[word] = true
		}
	}
	for word := range inModel {
		require.True(t, checked[word], "%s of %s is checked by nothing", word, modelFile)
	}
}

// With no search at a time nothing would ever run.
func TestParallelSearches(t *testing.T) {
	for _, n := range []int{0, -1} {
		err := runAll(context.Background(), n, checks[:1], func(check, result) { t.Error("nothing can have run") })
		require.ErrorContains(t, err, "want at least 1")
	}
}
