package verbs

import "fmt"

// Beside READs, a queue pair carries a few words: SENDs of no bytes whose immediate is the
// message. The client greets (so that the target knows that it came), says now and then
// that it reads (which the target cannot see), and both say goodbye.
type message uint32

const (
	msgHello message = 1 + iota
	msgUsed
	msgBye
)

// bye is why a connection ends, the value of msgBye.
type bye uint32

const (
	byeRevoked bye = 1 + iota // by the target
	byeBudget                 // the target needs the queue pair for others
	byeRail                   // this rail only: its port or device goes away
	byeLeft                   // the client closed
)

func (b bye) String() string {
	switch b {
	case byeRevoked:
		return "revoked"
	case byeBudget:
		return "evicted: the limit of queue pairs was reached"
	case byeRail:
		return "the port or device goes away"
	case byeLeft:
		return "closed by the client"
	}
	return fmt.Sprintf("reason %d", uint32(b))
}

func (m message) with(value uint32) uint32 { return uint32(m)<<24 | value&maxNumber24 }

func parseMessage(imm uint32) (message, uint32) { return message(imm >> 24), imm & maxNumber24 }

// Ids of requests: what they are must be in the id, because nothing else is valid in a
// failed completion. READs have neither bit.
const (
	idRecv    = 1 << 63
	idMessage = 1 << 62
	idNumber  = idMessage - 1
)

const (
	// messageSlots of the send queue are kept for messages.
	messageSlots = 4
	// recvSlots is how many messages may arrive before they are looked at. The peer sends
	// at most a hello, a goodbye and a word every few seconds.
	recvSlots = 4
)
