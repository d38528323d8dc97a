package arena

import (
	"fmt"
	"maps"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// chunkRetry is how long no other chunk is asked for after one was refused.
const chunkRetry = time.Second

// growLocked adds a chunk with room for a run of that many pages and tells whether
// there is a new one. It lets go of the lock meanwhile.
func (n *Namespace) growLocked(pages int) bool {
	if n.chunkSize(pages) == 0 {
		return false
	}
	if !n.mu.noChunk.IsZero() && n.a.cfg.Clock.Now().Before(n.mu.noChunk) {
		return false
	}
	seen := n.mu.made
	n.mu.Unlock()
	grown := n.makeChunk(seen, pages)
	n.mu.Lock()
	return grown
}

// chunkSize is the size in bytes that the next chunk should have; 0 where a run of
// that many pages is beyond the limits.
func (n *Namespace) chunkSize(pages int) uint64 {
	cfg, need, total := &n.a.cfg, uint64(pages)<<pageShift, n.registered.Load()
	size := cfg.MinChunkBytes
	if total > 0 {
		size = min(max((total/16+hugePage/2)/hugePage*hugePage, cfg.MinChunkBytes), cfg.MaxChunkBytes)
	}
	size = max(size, need)
	room := roomLeft(cfg.LimitBytes, n.a.registered.Load())
	if room < need {
		n.a.starved.Store(true)
	}
	if quota := n.quota.Load(); quota > 0 {
		room = min(room, roomLeft(quota, total))
	}
	size = min(size, room>>pageShift<<pageShift)
	if size < need {
		return 0
	}
	return size
}

func roomLeft(limit, used uint64) uint64 {
	if used >= limit {
		return 0
	}
	return limit - used
}

// makeChunk makes a chunk unless somebody else has, since made was seen.
func (n *Namespace) makeChunk(seen uint64, pages int) bool {
	n.growMu.Lock()
	defer n.growMu.Unlock()
	n.mu.Lock()
	made, id := n.mu.made, uint32(len(n.mu.chunks)+1)
	n.mu.Unlock()
	if made != seen {
		return true
	}
	size := n.reserve(pages)
	if size == 0 || id > layout.MaxChunk {
		n.a.registered.Add(-size)
		return false
	}
	mem, err := n.allocChunk(id, size)
	if err != nil {
		n.a.registered.Add(-size)
		n.a.cfg.Logger.Warn("arena: no new chunk; going on with what there is", "namespace", n.id, "chunk", id, "bytes", size, "err", err)
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.mu.made == seen {
			n.mu.chunks = append(n.mu.chunks, nil) // the id may have been seen
			n.mu.noChunk = n.a.cfg.Clock.Now().Add(chunkRetry)
		}
		return false
	}
	n.registered.Add(size)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.chunks = append(n.mu.chunks, newChunk(id, mem, size))
	n.mu.made++
	n.mu.freed++
	n.mu.noChunk = time.Time{}
	return true
}

// reserve takes the next chunk's size from the node's limit; several namespaces may
// do so at once.
func (n *Namespace) reserve(pages int) uint64 {
	for {
		used := n.a.registered.Load()
		size := n.chunkSize(pages)
		if size == 0 {
			return 0
		}
		if used+size <= n.a.cfg.LimitBytes && n.a.registered.CompareAndSwap(used, used+size) {
			return size
		}
	}
}

// allocChunk maps and announces a chunk.
func (n *Namespace) allocChunk(id uint32, size uint64) (*rdma.Memory, error) {
	mem, err := rdma.AllocMemory(fmt.Sprintf("%sns%d-chunk%d", n.a.cfg.Name, n.id, id), size, rdma.MemoryOptions{
		Shareable: true,
		HugePages: n.a.cfg.HugePages && size%hugePage == 0, // else it would be rounded up, beyond the limit
	})
	if err != nil {
		return nil, err
	}
	region := rdma.RegionID(id)
	n.setListed(region, mem)
	if n.a.cfg.OnChunk == nil {
		return mem, nil
	}
	if err := n.a.cfg.OnChunk(n.id, region, mem); err != nil {
		n.discard(region, mem)
		return nil, fmt.Errorf("arena: chunk %d of namespace %d refused: %w", id, n.id, err)
	}
	return mem, nil
}

// setListed changes what Chunks returns; nil removes.
func (n *Namespace) setListed(id rdma.RegionID, mem *rdma.Memory) {
	list := maps.Clone(*n.list.Load())
	if mem == nil {
		delete(list, id)
	} else {
		list[id] = mem
	}
	n.list.Store(&list)
}

// discard takes a chunk from everybody's sight and frees it.
func (n *Namespace) discard(id rdma.RegionID, mem *rdma.Memory) {
	n.setListed(id, nil)
	if n.a.cfg.OnChunkGone != nil {
		n.a.cfg.OnChunkGone(n.id, id)
	}
	if err := mem.Free(); err != nil {
		n.a.cfg.Logger.Error("arena: freeing a chunk", "namespace", n.id, "chunk", id, "err", err)
	}
}

// releaseChunks frees the chunks in which every page is free: their quarantine is
// over and nothing can be found in them.
func (n *Namespace) releaseChunks() {
	n.growMu.Lock()
	defer n.growMu.Unlock()
	var gone []*chunk
	n.mu.Lock()
	for i, c := range n.mu.chunks {
		if c != nil && c.freePages == c.pages() {
			gone = append(gone, c)
			n.mu.chunks[i] = nil
		}
	}
	n.mu.Unlock()
	for _, c := range gone {
		size := uint64(len(c.bytes))
		n.discard(rdma.RegionID(c.id), c.mem)
		n.registered.Add(-size)
		n.a.registered.Add(-size)
	}
}
