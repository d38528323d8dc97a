package layout

import "encoding/binary"

// A query is a look-up which a target runs in its own memory on behalf of a
// client (see rdma.Querier): the chain of dependent READs that the client would
// have posted, in one round trip. It decides nothing: the client validates the
// answer exactly as it validates READs.

// AnswerKind says what a look-up found.
type AnswerKind uint8

const (
	// AnswerBad: the query was malformed or pointed outside of the memory.
	AnswerBad AnswerKind = iota
	// AnswerFound: a live object with that key lay at Place; its bytes follow.
	AnswerFound
	// AnswerAbsent: every bucket of the chain was complete, no live object.
	AnswerAbsent
	// AnswerIncomplete: not found, and the chain cannot prove absence: a bucket is
	// incomplete, or a slot has the key's finger print but leads to another key.
	AnswerIncomplete
	// AnswerBusy: the chain or an object was being written; try again.
	AnswerBusy
)

const (
	querySize = 40
	// AnswerHeaderSize is what precedes the object in an answer.
	AnswerHeaderSize = 24

	// What one query may cost its target, whatever the bytes say: a table that a
	// writer of values made up must not turn one query into gigabytes of copying.
	maxChainWalk   = 64
	maxObjectReads = 8
)

// AppendQuery appends the query for key in table t. seed is the cluster's hash
// seed, with which objects are check-summed.
func AppendQuery(dst []byte, t Table, seed uint64, key []byte) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, t.ID)
	dst = binary.LittleEndian.AppendUint64(dst, t.Place.Offset)
	dst = binary.LittleEndian.AppendUint32(dst, t.Place.Chunk)
	dst = binary.LittleEndian.AppendUint32(dst, t.Buckets)
	dst = binary.LittleEndian.AppendUint32(dst, t.Overflow)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(key)))
	dst = binary.LittleEndian.AppendUint64(dst, seed)
	return append(dst, key...)
}

// Answer is a decoded answer. Object aliases the buffer.
type Answer struct {
	Kind   AnswerKind
	Place  Place
	Object []byte // undecoded; AnswerFound only
}

// DecodeAnswer decodes an answer.
func DecodeAnswer(b []byte) Answer {
	if len(b) < AnswerHeaderSize {
		return Answer{}
	}
	a := Answer{
		Kind:  AnswerKind(b[0]),
		Place: Place{Chunk: binary.LittleEndian.Uint32(b[4:]), Offset: binary.LittleEndian.Uint64(b[8:])},
	}
	n := uint64(binary.LittleEndian.Uint32(b[16:]))
	if a.Kind == AnswerFound {
		if n > uint64(len(b)-AnswerHeaderSize) {
			return Answer{}
		}
		a.Object = b[AnswerHeaderSize:][:n:n]
	}
	return a
}

// Memory gives the target's view of a region: the bytes of
// [offset, offset+length), or nil where they do not exist. They may change while
// they are looked at.
type Memory func(chunk uint32, offset, length uint64) []byte

// AnswerQuery runs the query and appends the answer to dst.
func AnswerQuery(mem Memory, query, dst []byte) []byte {
	start := len(dst)
	var header [AnswerHeaderSize]byte
	l := lookup{mem: mem, dst: append(dst, header[:]...), complete: true}
	kind := AnswerBad
	if l.parse(query) {
		kind = l.walk()
	}
	head := l.dst[start:]
	head[0] = byte(kind)
	if kind == AnswerFound {
		binary.LittleEndian.PutUint32(head[4:], l.found.Chunk)
		binary.LittleEndian.PutUint64(head[8:], l.found.Offset)
		binary.LittleEndian.PutUint32(head[16:], uint32(len(head)-AnswerHeaderSize))
	}
	return l.dst
}

// lookup is one query being answered.
type lookup struct {
	mem   Memory
	table Table
	seed  uint64
	key   []byte
	dst   []byte // answer so far

	found    Place
	objects  int  // objects looked at
	complete bool // nothing seen forbids concluding absence
	busy     bool // something seen was being written
}

func (l *lookup) parse(query []byte) bool {
	if len(query) < querySize {
		return false
	}
	l.table = Table{
		ID:       binary.LittleEndian.Uint64(query),
		Place:    Place{Offset: binary.LittleEndian.Uint64(query[8:]), Chunk: binary.LittleEndian.Uint32(query[16:])},
		Buckets:  binary.LittleEndian.Uint32(query[20:]),
		Overflow: binary.LittleEndian.Uint32(query[24:]),
	}
	keyLen := binary.LittleEndian.Uint32(query[28:])
	l.seed = binary.LittleEndian.Uint64(query[32:])
	l.key = query[querySize:]
	t := l.table
	return t.Buckets > 0 && t.Overflow <= MaxOverflow && t.Place.Offset%BucketSize == 0 &&
		keyLen > 0 && keyLen <= MaxKeySize && uint64(keyLen) == uint64(len(l.key))
}

// walk follows the key's chain.
func (l *lookup) walk() AnswerKind {
	h := HashKey(l.seed, l.key)
	number := h.HomeBucket(l.table.Buckets)
	var line [BucketSize]byte
	for range maxChainWalk {
		raw := l.mem(l.table.Place.Chunk, l.table.Offset(number), BucketSize)
		if len(raw) < BucketSize {
			return AnswerBad
		}
		CopyWords(line[:], raw)
		b := DecodeBucket(line[:], l.table.ID, number)
		l.complete = l.complete && b.Complete()
		l.busy = l.busy || !b.Sound
		if l.scan(&b, h.Fingerprint()) {
			return AnswerFound
		}
		next, ok := l.table.Next(b.Chain)
		if !ok {
			// A chain that leads out of the table is one that was being written.
			return l.verdict(l.busy || b.Chain != 0)
		}
		number = next
	}
	return AnswerBusy
}

func (l *lookup) verdict(busy bool) AnswerKind {
	switch {
	case busy:
		return AnswerBusy
	case l.complete:
		return AnswerAbsent
	default:
		return AnswerIncomplete
	}
}

// scan looks at the bucket's slots with that finger print.
func (l *lookup) scan(b *Bucket, fp uint16) bool {
	for _, s := range b.Slots {
		if s == 0 || s.Fingerprint() != fp {
			continue
		}
		if l.objects++; l.objects > maxObjectReads {
			l.busy = true
			return false
		}
		from := len(l.dst)
		switch l.appendObject(s) {
		case AnswerFound:
			l.found = s.Place()
			return true
		case AnswerIncomplete:
			l.complete = false
		default:
			l.busy = true
		}
		l.dst = l.dst[:from]
	}
	return false
}

// appendObject copies the object of slot s to the answer. AnswerFound: it is live
// and the key's. AnswerIncomplete: an object of another key. That may be a chance
// match of finger prints, but also what became of the key's own block after the
// bucket was read, so it proves nothing. AnswerBusy: anything else.
func (l *lookup) appendObject(s Slot) AnswerKind {
	at := s.Place()
	head := l.mem(at.Chunk, at.Offset, HeaderSize)
	if len(head) < HeaderSize {
		return AnswerBusy
	}
	var h [HeaderSize]byte
	CopyWords(h[:], head)
	info, _ := PeekHeader(h[:])
	if !info.plausible() || info.Size() > ClassSize(s.Class()) {
		return AnswerBusy
	}
	size := info.Size()
	raw := l.mem(at.Chunk, at.Offset, uint64(size))
	if len(raw) < size {
		return AnswerBusy
	}
	// The key first: another key's value need not be copied.
	from, keyEnd := len(l.dst), HeaderSize+info.KeyLen
	l.dst = append(append(l.dst, h[:]...), raw[HeaderSize:keyEnd]...)
	if string(l.dst[from+HeaderSize:]) != string(l.key) {
		return AnswerIncomplete
	}
	l.dst = append(l.dst, raw[keyEnd:size]...)
	o, verdict := DecodeObject(l.dst[from:], l.seed, at)
	if verdict != Valid || o.State != StateLive {
		return AnswerBusy
	}
	return AnswerFound
}
