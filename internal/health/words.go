package health

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// NameShards names shards in ascending order, runs of three and more as ranges.
func NameShards(shards []uint32) string {
	if len(shards) == 1 {
		if shards[0] == 0 {
			return "group 0 (the cluster's own)"
		}
		return fmt.Sprintf("shard %d", shards[0])
	}
	var data []uint64
	prefix := ""
	for _, s := range shards {
		if s == 0 {
			prefix = "group 0 (the cluster's own) and "
		} else {
			data = append(data, uint64(s))
		}
	}
	return prefix + counted("shard", data)
}

// nameNodes names nodes as nameShards does shards.
func nameNodes(nodes []uint64) string { return counted("node", nodes) }

func counted(noun string, ids []uint64) string {
	if len(ids) != 1 {
		noun += "s"
	}
	return noun + " " + ranges(ids)
}

func ranges(ids []uint64) string {
	ids = slices.Compact(slices.Sorted(slices.Values(ids)))
	if len(ids) == 0 {
		return "none"
	}
	var words []string
	for i := 0; i < len(ids); {
		end := i
		for end+1 < len(ids) && ids[end+1] == ids[end]+1 {
			end++
		}
		switch {
		case end >= i+2:
			words = append(words, fmt.Sprintf("%d-%d", ids[i], ids[end]))
			i = end + 1
		default:
			words = append(words, strconv.FormatUint(ids[i], 10))
			i++
		}
	}
	return strings.Join(words, ", ")
}

// length of time for people.
func length(d time.Duration) string {
	d = max(d, 0)
	if d >= 10*time.Second {
		return d.Round(time.Second).String()
	}
	return d.Round(100 * time.Millisecond).String()
}

func clockTime(unixMs int64) string {
	return time.UnixMilli(unixMs).UTC().Format(time.RFC3339)
}

func orElse(text, other string) string {
	if text == "" {
		return other
	}
	return text
}
