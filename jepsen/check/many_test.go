package check

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/history"
)

// The answers of a GetMany belong to its keys, in their order. Each answer here is right
// for the key that it names, so nothing else finds it.
func TestManyAnswersOtherKeys(t *testing.T) {
	k, l := history.Item{Key: "k", Got: 1, Version: 10, Shard: 1}, history.Item{Key: "l", Shard: 1}
	for name, c := range map[string]struct {
		keys  []string
		items []history.Item
		want  bool
	}{
		"as asked":          {[]string{"k", "l"}, []history.Item{k, l}, false},
		"swapped":           {[]string{"k", "l"}, []history.Item{l, k}, true},
		"twice the same":    {[]string{"k", "l"}, []history.Item{k, k}, true},
		"one too many":      {[]string{"k"}, []history.Item{k, l}, true},
		"one too few":       {[]string{"k", "l"}, []history.Item{k}, true},
		"none at all":       {[]string{"k", "l"}, nil, true},
		"nobody asked this": {[]string{"m"}, []history.Item{k}, true},
	} {
		s := newScript()
		s.op(1, 1, 2, put(1, 10))
		s.op(2, 3, 4, history.Op{Kind: history.Many, Keys: c.keys, Items: c.items})
		r := Judge(&s.h, Options{})
		found := slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Kind == KindSanity })
		require.Equal(t, c.want, found, "%s: %v", name, r.Findings)
		if !c.want {
			require.Equal(t, Pass, r.Verdict, name)
			continue
		}
		require.Equal(t, Violation, r.Verdict, name)
	}
}
