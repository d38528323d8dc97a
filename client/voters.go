package client

import "math/bits"

// maxVoters bounds the members of a configuration that reads can be confirmed
// with, both halves of a joint one together.
const maxVoters = 8

// quorum is the rule of one Raft configuration over numbered voters (bit i: voter
// i). While the configuration is joint a majority of both halves is needed.
// Learners have no number.
type quorum struct {
	incoming, outgoing uint8 // outgoing 0: not joint
}

// reached tells whether the voters in set are enough.
func (q quorum) reached(set uint8) bool {
	return majority(set, q.incoming) && (q.outgoing == 0 || majority(set, q.outgoing))
}

func majority(set, half uint8) bool {
	return 2*bits.OnesCount8(set&half) > bits.OnesCount8(half)
}

// makeQuorum numbers the voters of both halves. ok is false for a configuration
// that is empty or too large.
func makeQuorum(incoming, outgoing []uint64) (ids []uint64, q quorum, ok bool) {
	number := func(id uint64) int {
		for i, have := range ids {
			if have == id {
				return i
			}
		}
		ids = append(ids, id)
		return len(ids) - 1
	}
	for half, list := range [2][]uint64{incoming, outgoing} {
		for _, id := range list {
			i := number(id)
			if i >= maxVoters {
				return nil, quorum{}, false
			}
			if half == 0 {
				q.incoming |= 1 << i
			} else {
				q.outgoing |= 1 << i
			}
		}
	}
	return ids, q, q.incoming != 0
}
