package arena

// Stats of a shard, a namespace or the node.
type Stats struct {
	RegisteredBytes uint64 // chunks; 0 for a shard, which has none of its own
	UsedBytes       uint64 // pages of slabs, runs and tables that hold something or wait in quarantine; of a shard: blocks and table
	ObjectBytes     uint64 // blocks of objects
	IndexBytes      uint64 // tables in use
	Objects         uint64
	Evictions       uint64
	NonResident     uint64 // puts that found no room
	TableGrowths    uint64
}

// counters are the part of Stats that is counted as it happens.
type counters struct {
	ObjectBytes  uint64
	Objects      uint64
	Evictions    uint64
	NonResident  uint64
	TableGrowths uint64
}

func (c *counters) stats() Stats {
	return Stats{
		ObjectBytes: c.ObjectBytes, Objects: c.Objects, Evictions: c.Evictions,
		NonResident: c.NonResident, TableGrowths: c.TableGrowths,
	}
}

// Stats of the shard.
func (s *Shard) Stats() Stats {
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	st := s.stats.stats()
	st.IndexBytes = s.indexBytesLocked()
	st.UsedBytes = st.ObjectBytes + st.IndexBytes
	return st
}

func (s *Shard) indexBytesLocked() uint64 {
	if s.table == nil {
		return 0
	}
	return s.table.Size()
}

// Stats of the namespace.
func (n *Namespace) Stats() Stats {
	n.mu.Lock()
	defer n.mu.Unlock()
	st := n.mu.stats.stats()
	st.RegisteredBytes = n.registered.Load()
	st.UsedBytes = uint64(n.mu.heldPages-n.mu.emptyPages) << pageShift
	for _, s := range n.mu.shards {
		st.IndexBytes += s.indexBytesLocked()
	}
	return st
}

// Stats of the node.
func (a *Arena) Stats() Stats {
	var sum Stats
	for _, n := range a.namespaces() {
		st := n.Stats()
		sum.RegisteredBytes += st.RegisteredBytes
		sum.UsedBytes += st.UsedBytes
		sum.ObjectBytes += st.ObjectBytes
		sum.IndexBytes += st.IndexBytes
		sum.Objects += st.Objects
		sum.Evictions += st.Evictions
		sum.NonResident += st.NonResident
		sum.TableGrowths += st.TableGrowths
	}
	return sum
}
