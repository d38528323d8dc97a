package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/backup"
)

const (
	restoreParallel = 8
	// restoreChunk is how many keys go to a shard by one call.
	restoreChunk = 4096
	readSize     = 1 << 20
)

func newRestore(s *settings) *cobra.Command {
	var r restoreRun
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Put a backup into an empty cluster",
		Long: `Puts the content of a backup into a cluster that has no keys and no namespaces but default. Such a
cluster was bootstrapped anew and has an id of its own; its number of shards and of nodes may be other
ones than those of the backup's. Wants an operator's token. With - the backup comes from standard input.

A file is verified as a whole first: where it is damaged, cut short, or of a newer format, nothing is
changed. What comes from standard input is verified block by block, so there a part may be restored
before damage shows; the error says which.

Keys get their namespaces, values and times of expiry back, and new versions; those past their time are
left out. Tokens come back too, and are valid at once where nodes want tokens.

A restore that was cut off is finished by the same command with --continue: keys that are there stay as
they are, whoever wrote them. Memory stays bounded: so many blocks of 1 MiB as --parallel says.
--timeout is how long there may be no progress (default 1m0s).`,
		Example: `  kvctl restore kvd.kvdbak
  kvctl restore --continue kvd.kvdbak
  kvctl restore --dry-run kvd.kvdbak        # verify it and show what is in it; no cluster is asked
  ssh backups cat kvd.kvdbak | kvctl restore -`,
		Args: exactArgs("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if r.parallel < 1 {
				return usagef("--parallel %d: want at least 1", r.parallel)
			}
			return s.restore(cmd, args[0], &r)
		},
	}
	cmd.Flags().BoolVar(&r.goOn, "continue", false, "finish a restore that was cut off: keep what is there")
	cmd.Flags().BoolVar(&r.dryRun, "dry-run", false, "verify the file and show what is in it, and do nothing else")
	cmd.Flags().IntVar(&r.parallel, "parallel", restoreParallel, "calls under way at a time")
	return cmd
}

// restoreRun is one restore.
type restoreRun struct {
	goOn, dryRun bool
	parallel     int

	in       *bufio.Reader
	below    *endingReader   // of in
	file     *os.File        // nil: what comes can be read once only
	summary  *backup.Summary // nil: not verified yet
	progress *progress
	importer *client.Importer

	names map[uint32]string // namespaces of the file, by the ids that they have in it
	ids   map[string]uint32 // ids in the cluster

	mu   sync.Mutex
	sum  kvdv1.ImportResponse
	done []*kvdv1.BackupShard
	at   *kvdv1.BackupShard // begun and not yet at its end
}

func (s *settings) restore(cmd *cobra.Command, name string, r *restoreRun) error {
	began := time.Now()
	if err := r.open(cmd, name); err != nil {
		return err
	}
	if r.file != nil {
		defer func() { _ = r.file.Close() }()
	}
	r.progress = newProgress(cmd.ErrOrStderr(), "verify")
	defer r.progress.finish()
	if r.file != nil || r.dryRun {
		if err := r.verify(); err != nil {
			if cmd.Context().Err() != nil {
				err = errInterrupted
			}
			return fmt.Errorf("restore: %s: %w; nothing was changed", name, err)
		}
	}
	if r.dryRun {
		return s.printSummary(cmd, r.summary)
	}
	err := s.withSteps(cmd, func(ctx context.Context, a *client.Admin) error {
		if err := r.prepare(ctx, a); err != nil {
			return err
		}
		r.progress.finish()
		r.progress.title = "restore"
		return r.run(ctx)
	})
	if err != nil {
		if cmd.Context().Err() != nil && !errors.Is(err, errInterrupted) {
			err = fmt.Errorf("%w; nothing was changed", errInterrupted)
		}
		return fmt.Errorf("restore: %w", err)
	}
	r.progress.finish()
	return s.printRestored(cmd, r, time.Since(began))
}

func (r *restoreRun) open(cmd *cobra.Command, name string) error {
	if name == "-" {
		r.read(cmd.Context(), cmd.InOrStdin())
		return nil
	}
	f, err := os.Open(name)
	if err != nil {
		return usageError{err}
	}
	info, err := f.Stat()
	switch {
	case err != nil:
		return errors.Join(err, f.Close())
	case info.IsDir():
		return errors.Join(usagef("%s is a directory: want a file that kvctl backup wrote", name), f.Close())
	}
	r.read(cmd.Context(), f)
	if info.Mode().IsRegular() {
		r.file = f
	}
	return nil
}

func (r *restoreRun) read(ctx context.Context, from io.Reader) {
	r.below = &endingReader{ctx: ctx, r: from}
	r.in = bufio.NewReaderSize(r.below, readSize)
}

// verify reads the whole file and goes back to its beginning.
func (r *restoreRun) verify() (err error) {
	var size uint64
	if r.file != nil {
		if info, err := r.file.Stat(); err == nil {
			size = uint64(info.Size())
		}
	}
	r.progress.setTotal(size)
	var before int64
	r.summary, err = backup.Verify(r.in, func(n int64) {
		r.progress.add(uint64(n - before))
		before = n
	})
	if err != nil || r.file == nil {
		return err
	}
	if _, err := r.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	r.read(r.below.ctx, r.file)
	return nil
}

// prepare refuses clusters that a restore could harm.
func (r *restoreRun) prepare(ctx context.Context, a *client.Admin) (err error) {
	if r.importer, err = a.NewImporter(ctx); err != nil {
		return err
	}
	c := r.importer.Cluster()
	if r.summary != nil && r.summary.MaxValue > c.GetMaxValueBytes() {
		return fmt.Errorf("%w: the backup has a value of %d bytes, the nodes take at most %d: raise max-value-bytes on every node; nothing was changed", client.ErrInvalid, r.summary.MaxValue, c.GetMaxValueBytes())
	}
	if r.goOn {
		return nil
	}
	const advice = "bootstrap a new one to restore into, or give --continue to finish a restore; nothing was changed"
	var others []string
	for _, ns := range c.GetNamespaces() {
		if ns.GetName() != "default" {
			others = append(others, ns.GetName())
		}
	}
	if len(others) > 0 {
		return fmt.Errorf("%w: cluster %s is not empty: it has %d namespaces beside default (%s): %s", client.ErrConflict, c.GetClusterId(), len(others), shortList(others), advice)
	}
	keys, err := r.importer.Keys(ctx, false)
	if err == nil && keys > 0 {
		err = fmt.Errorf("%w: cluster %s is not empty: it has keys: %s", client.ErrConflict, c.GetClusterId(), advice)
	}
	return err
}

func shortList(names []string) string {
	if len(names) > 3 {
		return strings.Join(names[:3], ", ") + ", ..."
	}
	return strings.Join(names, ", ")
}

// run restores everything. Blocks are read one after the other and put side by side.
func (r *restoreRun) run(ctx context.Context) error {
	x, err := backup.NewReader(r.in)
	if err != nil {
		return fmt.Errorf("%w; nothing was changed", err)
	}
	total := uint64(0)
	if r.summary != nil {
		total = r.summary.End.GetBytes()
	}
	r.progress.setTotal(total)
	puts, pctx := errgroup.WithContext(ctx)
	puts.SetLimit(r.parallel)
	r.below.ctx = pctx // there is nothing to wait for once a put has failed
	readErr := func() error {
		for pctx.Err() == nil {
			rec, err := x.Next()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err == nil {
				err = r.take(ctx, pctx, puts, rec)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}()
	err = puts.Wait()
	if err == nil || !errors.Is(readErr, context.Canceled) {
		err = errors.Join(err, readErr)
	}
	if ctx.Err() != nil {
		err = errInterrupted
	}
	if err != nil {
		return r.unfinished(err)
	}
	return nil
}

func (r *restoreRun) take(ctx, pctx context.Context, puts *errgroup.Group, rec backup.Record) error {
	switch {
	case rec.Cluster != nil:
		all := rec.Cluster.GetNamespaces()
		if r.summary != nil {
			all = r.summary.Namespaces
		}
		return r.make(ctx, all, rec.Cluster.GetTokens())
	case rec.Namespaces != nil && r.summary == nil:
		return r.make(ctx, rec.Namespaces, nil)
	case rec.Begin != nil:
		r.at = rec.Begin
	case rec.End != nil:
		r.done, r.at = append(r.done, rec.End), nil
		r.progress.note("shard %d of the backup", rec.End.GetShard())
	case rec.Items != nil:
		for _, it := range rec.Items {
			it.NamespaceId = r.ids[r.names[it.GetNamespaceId()]]
		}
		split := r.importer.Split(rec.Items)
		for _, shard := range slices.Sorted(maps.Keys(split)) {
			for chunk := range slices.Chunk(split[shard], restoreChunk) {
				puts.Go(func() error { return r.put(pctx, shard, chunk) })
			}
		}
	}
	return nil
}

// make makes the namespaces in the order of their ids, so that they get the same ones.
func (r *restoreRun) make(ctx context.Context, namespaces []*kvdv1.NamespaceInfo, tokens []*kvdv1.TokenRecord) (err error) {
	namespaces = slices.Clone(namespaces)
	slices.SortFunc(namespaces, func(a, b *kvdv1.NamespaceInfo) int { return int(int64(a.GetId()) - int64(b.GetId())) })
	if r.ids, err = r.importer.Prepare(ctx, namespaces, tokens); err != nil {
		return err
	}
	r.names = map[uint32]string{}
	for _, ns := range namespaces {
		r.names[ns.GetId()] = ns.GetName()
		if r.ids[ns.GetName()] == 0 {
			return fmt.Errorf("namespace %s was not made", ns.GetName())
		}
	}
	return nil
}

func (r *restoreRun) put(ctx context.Context, shard uint32, items []*kvdv1.BackupItem) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	got, err := r.importer.Import(ctx, shard, items)
	if err != nil {
		return err
	}
	var bytes uint64
	for _, it := range items {
		bytes += backup.ItemBytes(it)
	}
	r.progress.add(bytes)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sum.Applied += got.GetApplied()
	r.sum.Same += got.GetSame()
	r.sum.Other += got.GetOther()
	r.sum.Expired += got.GetExpired()
	return nil
}

// unfinished says what state is left.
func (r *restoreRun) unfinished(err error) error {
	if r.names == nil {
		return fmt.Errorf("%w; nothing was restored", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	where := fmt.Sprintf("%d shards of the backup were read", len(r.done))
	if r.at != nil {
		where += fmt.Sprintf(", and a part of shard %d", r.at.GetShard())
	}
	advice := "the same command with --continue goes on"
	if errors.Is(err, backup.ErrDamaged) || errors.Is(err, backup.ErrTruncated) {
		advice = "throw the cluster away, or complete it with --continue and a whole copy of the backup"
	}
	counts := fmt.Sprintf("%d keys put", r.sum.GetApplied())
	if n := r.sum.GetSame() + r.sum.GetOther(); n > 0 {
		counts += fmt.Sprintf(" (%d were there already)", n)
	}
	return fmt.Errorf("%w; the cluster is left with a part of the backup: %s, and %s: %s", err, where, counts, advice)
}

func (s *settings) printRestored(cmd *cobra.Command, r *restoreRun, took time.Duration) error {
	var n = &r.sum
	if s.output == "json" {
		return printJSON(cmd.OutOrStdout(), struct {
			Cluster  string `json:"cluster_id"`
			Shards   int    `json:"backup_shards"`
			Restored uint64 `json:"restored"`
			Same     uint64 `json:"present_same"`
			Other    uint64 `json:"present_other"`
			Expired  uint64 `json:"expired"`
		}{r.importer.Cluster().GetClusterId(), len(r.done), n.GetApplied(), n.GetSame(), n.GetOther(), n.GetExpired()})
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "restored %s keys into cluster %s after %v\n", humanize.Comma(int64(n.GetApplied())), r.importer.Cluster().GetClusterId(), took.Round(time.Millisecond))
	for _, more := range []struct {
		n    uint64
		what string
	}{
		{n.GetSame(), "were there already"}, {n.GetOther(), "were there already with another value or expiry, and stay so"}, {n.GetExpired(), "are past their time, and were left out"},
	} {
		if more.n > 0 && err == nil {
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s keys %s\n", humanize.Comma(int64(more.n)), more.what)
		}
	}
	return err
}

type backupShardJSON struct {
	Shard uint32 `json:"shard"`
	Index uint64 `json:"index"`
	Term  uint64 `json:"term"`
	Keys  uint64 `json:"keys"`
	Bytes uint64 `json:"bytes"`
}

type backupJSON struct {
	ClusterID  string            `json:"cluster_id"`
	Taken      string            `json:"taken"`
	Version    string            `json:"version"`
	Keys       uint64            `json:"keys"`
	Bytes      uint64            `json:"bytes"`
	FileBytes  int64             `json:"file_bytes"`
	Checksum   string            `json:"checksum"`
	Namespaces []string          `json:"namespaces"`
	Tokens     int               `json:"tokens"`
	Shards     []backupShardJSON `json:"shards"`
}

func summaryJSON(b *backup.Summary) backupJSON {
	j := backupJSON{
		ClusterID: b.Cluster.GetClusterId(), Taken: time.UnixMilli(b.Cluster.GetTakenUnixMs()).Format(time.RFC3339), Version: b.Cluster.GetVersion(),
		Keys: b.End.GetKeys(), Bytes: b.End.GetBytes(), FileBytes: b.FileBytes, Checksum: fmt.Sprintf("%016x", b.End.GetChecksum()),
		Tokens: len(b.Cluster.GetTokens()), Shards: []backupShardJSON{},
	}
	for _, ns := range b.Namespaces {
		j.Namespaces = append(j.Namespaces, ns.GetName())
	}
	for _, sh := range b.Shards {
		j.Shards = append(j.Shards, backupShardJSON{sh.GetShard(), sh.GetIndex(), sh.GetTerm(), sh.GetKeys(), sh.GetBytes()})
	}
	return j
}

func (s *settings) printSummary(cmd *cobra.Command, b *backup.Summary) error {
	s.output = strings.TrimSpace(s.output)
	j := summaryJSON(b)
	if s.output == "json" {
		return printJSON(cmd.OutOrStdout(), j)
	}
	out := cmd.OutOrStdout()
	fmt.Fprintf(out, "whole and sound: cluster %s, taken %s by kvd %s, check sum %s\n", j.ClusterID, j.Taken, j.Version, j.Checksum)
	fmt.Fprintf(out, "%s keys, %s in %s of file; %d tokens; namespaces %s\n", humanize.Comma(int64(j.Keys)), humanize.IBytes(j.Bytes), humanize.IBytes(uint64(j.FileBytes)), j.Tokens, strings.Join(j.Namespaces, " "))
	t := newTable(out, "shard", "index", "term", "keys", "bytes")
	for _, sh := range j.Shards {
		t.AppendRow([]any{sh.Shard, sh.Index, sh.Term, sh.Keys, sh.Bytes})
	}
	t.Render()
	return nil
}
