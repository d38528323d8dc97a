package server

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/engine"
)

const (
	tokenPrefix = "kvd"
	// rootTokenID is that of the token in a file of the node: it is in no list, and no
	// other token can have it.
	rootTokenID = "root"
	secretBytes = 32
	// maxTokens is looked at by who proposes one; a few more do no harm.
	maxTokens = 4096
	// maxGrants of one token.
	maxGrants = 256
	// anyNamespace in a grant means all of them.
	anyNamespace = "*"
)

var (
	tokenID   = regexp.MustCompile(`^[0-9a-f]{16}$`)
	tokenName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._@-]{0,61}[A-Za-z0-9])?$`)
)

var errTokenText = errors.New("want kvd_ID_SECRET as kvctl token create printed it")

// parseToken takes a token apart. The error never repeats any of it.
func parseToken(s string) (id string, secret [secretBytes]byte, err error) {
	prefix, rest, _ := strings.Cut(s, "_")
	id, digits, ok := strings.Cut(rest, "_")
	if !ok || prefix != tokenPrefix || id != rootTokenID && !tokenID.MatchString(id) || len(digits) != 2*secretBytes || digits != strings.ToLower(digits) {
		return "", secret, errTokenText
	}
	if _, err := hex.Decode(secret[:], []byte(digits)); err != nil {
		return "", secret, errTokenText
	}
	return id, secret, nil
}

// token is one that this node knows. Immutable: who holds one sees by tokens.alive
// whether it still counts.
type token struct {
	rec *kvdv1.TokenRecord
}

func (t *token) id() string   { return t.rec.GetInfo().GetId() }
func (t *token) name() string { return t.rec.GetInfo().GetName() }

// expired tells whether the token's time is over at that time.
func (t *token) expired(nowUnixMs int64) bool {
	e := t.rec.GetInfo().GetExpiresUnixMs()
	return e != 0 && e <= nowUnixMs
}

func (t *token) has(secret [secretBytes]byte) bool {
	sum := sha256.Sum256(secret[:])
	return subtle.ConstantTimeCompare(sum[:], t.rec.GetSecretSha256()) == 1
}

// right is what a grant gives.
type right uint8

const (
	rightRead right = 1 << iota
	rightWrite
	rightAdmin
)

func (r right) String() string {
	switch r {
	case rightRead:
		return "read"
	case rightWrite:
		return "write"
	case rightAdmin:
		return "admin"
	}
	return "read or write"
}

func rightsOf(g *kvdv1.Grant) right {
	var r right
	switch {
	case g.GetAdmin():
		return rightRead | rightWrite | rightAdmin
	case g.GetRead() && g.GetWrite():
		return rightRead | rightWrite
	case g.GetRead():
		r = rightRead
	case g.GetWrite():
		r = rightWrite
	}
	return r
}

// may tells whether the token has one of the rights in the namespace.
func (t *token) may(want right, namespace string) bool {
	for _, g := range t.rec.GetInfo().GetGrants() {
		if (g.GetNamespace() == anyNamespace || g.GetNamespace() == namespace) && rightsOf(g)&want != 0 {
			return true
		}
	}
	return false
}

// mayAnywhere tells whether there is a namespace in which it has one of the rights.
func (t *token) mayAnywhere(want right) bool {
	return slices.ContainsFunc(t.rec.GetInfo().GetGrants(), func(g *kvdv1.Grant) bool { return rightsOf(g)&want != 0 })
}

// tokens are those of group 0 and the one in the node's file.
type tokens struct {
	root *token // nil: none; never changes
	// known is replaced, never changed.
	known atomic.Pointer[map[string]*token]
	mu    struct {
		sync.Mutex
		// watches end what was opened by a token when the token ends.
		watches map[*token]map[*watch]struct{}
	}
}

type watch struct{ end context.CancelCauseFunc }

// errTokenEnded is the cause with which everything ends that a token had open.
var errTokenEnded = fail(kvdv1.ErrorDetail_REASON_UNAUTHENTICATED, "the token was revoked, or its time is over: ask the cluster's operator for another")

func newTokens(root *token) *tokens {
	t := &tokens{root: root}
	t.known.Store(&map[string]*token{})
	t.mu.watches = map[*token]map[*watch]struct{}{}
	return t
}

// find returns the token of that id; nil where there is none.
func (t *tokens) find(id string) *token {
	if id == rootTokenID {
		return t.root
	}
	return (*t.known.Load())[id]
}

// alive tells whether what was found by find still counts.
func (t *tokens) alive(x *token, now time.Time) bool {
	return t.find(x.id()) == x && !x.expired(now.UnixMilli())
}

// watch calls end once the token is no more; it may be at once. forget must follow.
func (t *tokens) watch(x *token, end context.CancelCauseFunc, now time.Time) (forget func()) {
	w := &watch{end}
	t.mu.Lock()
	if t.mu.watches[x] == nil {
		t.mu.watches[x] = map[*watch]struct{}{}
	}
	t.mu.watches[x][w] = struct{}{}
	t.mu.Unlock()
	// After it was noted: whoever takes the token away later finds it.
	if !t.alive(x, now) {
		end(errTokenEnded)
	}
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.mu.watches[x], w)
		if len(t.mu.watches[x]) == 0 {
			delete(t.mu.watches, x)
		}
	}
}

// endDead ends what was opened by tokens that are no more, or whose time is over by
// this node's clock: a node that is cut off hears of no expiry.
func (t *tokens) endDead(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for x, watches := range t.mu.watches {
		if !t.alive(x, now) {
			for w := range watches {
				w.end(errTokenEnded)
			}
		}
	}
}

// set replaces all tokens of group 0. One that stays the same stays itself.
func (t *tokens) set(recs []*kvdv1.TokenRecord) {
	old, next := *t.known.Load(), map[string]*token{}
	for _, rec := range recs {
		id := rec.GetInfo().GetId()
		if have := old[id]; have != nil && proto.Equal(have.rec, rec) {
			next[id] = have
			continue
		}
		next[id] = &token{rec}
	}
	t.known.Store(&next)
	t.endDead(time.UnixMilli(0)) // of no expiry here: that is up to the entry, or to the node's clock
}

func (t *tokens) records() []*kvdv1.TokenRecord {
	var all []*kvdv1.TokenRecord
	for _, x := range *t.known.Load() {
		all = append(all, x.rec)
	}
	slices.SortFunc(all, func(a, b *kvdv1.TokenRecord) int {
		return strings.Compare(a.GetInfo().GetName(), b.GetInfo().GetName())
	})
	return all
}

// infos is what may be told of the tokens.
func (t *tokens) infos() []*kvdv1.TokenInfo {
	var all []*kvdv1.TokenInfo
	for _, rec := range t.records() {
		all = append(all, rec.GetInfo())
	}
	return all
}

// overdue lists the tokens whose time is over.
func (t *tokens) overdue(now time.Time) []string {
	var ids []string
	for id, x := range *t.known.Load() {
		if x.expired(now.UnixMilli()) {
			ids = append(ids, id)
		}
	}
	return ids
}

// load takes the tokens from the engine.
func (t *tokens) load(eng *engine.Group) error {
	var recs []*kvdv1.TokenRecord
	err := eng.ScanAux(auxToken, nil, nil, func(key, value []byte) (bool, error) {
		rec, err := decodeToken(key, value)
		recs = append(recs, rec)
		return err == nil, err
	})
	if err != nil {
		return err
	}
	t.set(recs)
	return nil
}

// decodeToken refuses, by ErrCorrupt, what apply can not have stored.
func decodeToken(key, value []byte) (*kvdv1.TokenRecord, error) {
	rec := &kvdv1.TokenRecord{}
	if err := proto.Unmarshal(value, rec); err != nil {
		return nil, fmt.Errorf("%w: token record: %w", engine.ErrCorrupt, err)
	}
	if rec.GetInfo().GetId() != string(key) || !tokenID.Match(key) || len(rec.GetSecretSha256()) != sha256.Size {
		return nil, fmt.Errorf("%w: token record %q has id %q and a sum of %d bytes", engine.ErrCorrupt, key, rec.GetInfo().GetId(), len(rec.GetSecretSha256()))
	}
	return rec, nil
}

// tokenResult is the outcome of a TokenOp.
type tokenResult struct {
	info    *kvdv1.TokenInfo // create: what is stored
	existed bool             // create: another one has the name or the id
	unknown bool             // revoke: there is none
}

// apply is a function of the log alone; what is open by a token that goes ends here.
func (t *tokens) apply(b *engine.Batch, now int64, op *kvdv1.TokenOp) (r tokenResult, err error) {
	recs := t.records()
	drop := func(id string) error {
		recs = slices.DeleteFunc(recs, func(x *kvdv1.TokenRecord) bool { return x.GetInfo().GetId() == id })
		return b.DeleteAux(auxToken, []byte(id))
	}
	switch {
	case op.GetCreate() != nil:
		rec := op.GetCreate()
		info := rec.GetInfo()
		for _, have := range recs {
			if proto.Equal(have, rec) {
				return tokenResult{info: info}, nil // the same once more
			}
			if have.GetInfo().GetId() == info.GetId() || have.GetInfo().GetName() == info.GetName() {
				return tokenResult{info: have.GetInfo(), existed: true}, nil
			}
		}
		v, err := proto.Marshal(rec)
		if err != nil {
			return r, fmt.Errorf("server: encode token: %w", err)
		}
		if _, err := decodeToken([]byte(info.GetId()), v); err != nil {
			return r, err
		}
		r.info = info
		recs = append(recs, rec)
		err = b.PutAux(auxToken, []byte(info.GetId()), v)
		if err != nil {
			return r, err
		}
	case op.GetRevoke() != "":
		if (*t.known.Load())[op.GetRevoke()] == nil {
			return tokenResult{unknown: true}, nil
		}
		if err := drop(op.GetRevoke()); err != nil {
			return r, err
		}
	case op.GetExpire() != nil:
		for _, id := range op.GetExpire().GetIds() {
			if x := (*t.known.Load())[id]; x == nil || !x.expired(now) {
				continue
			}
			if err := drop(id); err != nil {
				return r, err
			}
		}
	default:
		return r, fmt.Errorf("%w: group 0 has a change of tokens that this version does not know", engine.ErrCorrupt)
	}
	t.set(recs)
	return r, nil
}
