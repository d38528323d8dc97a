package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/backup"
)

const (
	// stepTimeout is how long a backup or a restore may make no progress, unless
	// --timeout says so.
	stepTimeout = time.Minute
	// exportTries of one shard, each from its first key, when nodes that keep it die.
	exportTries = 5
)

func newBackup(s *settings) *cobra.Command {
	var overwrite bool
	cmd := &cobra.Command{
		Use:   "backup FILE",
		Short: "Write all keys of all namespaces to a file",
		Long: `Writes a backup of the whole cluster to FILE, or with - to standard output. Wants an operator's token.

Each shard is backed up as it is at one index of its log, which its leader confirms and the file
states: every write that was acknowledged before the backup came to the shard is in it, and nothing
that is half done. The shards' indexes are not of one moment: what was written meanwhile may be in
one shard and not in another. Writes go on, and are not slowed but by what the reading costs.

In the file are: all keys with their namespaces, values and times of expiry; the namespaces with their
ids and settings; the tokens with their grants and the SHA-256 of their secrets (not the secrets, and
not the root token). Not in it: versions (a restored key gets a new one), writers, settings of nodes,
certificates. Nothing in it is encrypted; the file is made so that nobody but its owner can read it.

It is written to FILE.partial and renamed when it is whole and synced. Blocks are compressed by zstd and
check-summed. --timeout is how long there may be no progress (default 1m0s).`,
		Example: `  kvctl backup /backups/kvd-$(date +%F).kvdbak
  kvctl backup - | ssh backups 'cat > kvd.kvdbak'
  kvctl restore --dry-run kvd.kvdbak        # verify it and show what is in it`,
		Args: exactArgs("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return s.backup(cmd, args[0], overwrite)
		},
	}
	cmd.Flags().BoolVar(&overwrite, "overwrite", false, "replace FILE if it exists")
	return cmd
}

// withSteps runs f with an admin client; the timeout is for each step of f.
func (s *settings) withSteps(cmd *cobra.Command, f func(context.Context, *client.Admin) error) error {
	cfg := s.config()
	if !cmd.Flags().Changed("timeout") {
		cfg.CallTimeout = stepTimeout
	}
	a, err := client.DialAdmin(cfg)
	if err != nil {
		return err
	}
	defer func() { _ = a.Close() }()
	// Steps outlast the loss of nodes, but one that answers has to be there to begin with.
	if _, err := a.Status(cmd.Context()); err != nil {
		return err
	}
	return f(cmd.Context(), a)
}

func (s *settings) backup(cmd *cobra.Command, file string, overwrite bool) error {
	began := time.Now()
	out, err := newBackupFile(cmd, file, overwrite)
	if err != nil {
		return err
	}
	var b *backupRun
	err = s.withSteps(cmd, func(ctx context.Context, a *client.Admin) (err error) {
		b = &backupRun{admin: a, out: out, progress: newProgress(cmd.ErrOrStderr(), "backup")}
		defer b.progress.finish()
		return b.run(ctx)
	})
	if err != nil && cmd.Context().Err() != nil {
		err = fmt.Errorf("%w: what went to standard output is no whole backup", errInterrupted)
		if out.f != nil {
			err = fmt.Errorf("%w: %s was not written, and %s is removed", errInterrupted, file, out.f.Name())
		}
	}
	if err = out.done(err); err != nil {
		return fmt.Errorf("backup: %w", err)
	}
	return s.printBackup(cmd, file, b, time.Since(began))
}

func (s *settings) printBackup(cmd *cobra.Command, file string, b *backupRun, took time.Duration) error {
	if s.output == "json" && file != "-" {
		return printJSON(cmd.OutOrStdout(), summaryJSON(&backup.Summary{
			Cluster: b.cluster, Namespaces: b.cluster.GetNamespaces(), Shards: b.shards, End: b.end, FileBytes: b.out.size,
		}))
	}
	_, err := fmt.Fprintf(cmd.ErrOrStderr(), "backup of cluster %s: %d shards, %s keys, %s in %s of file, after %v\n", b.cluster.GetClusterId(), b.end.GetShards(),
		humanize.Comma(int64(b.end.GetKeys())), humanize.IBytes(b.end.GetBytes()), humanize.IBytes(uint64(b.out.size)), took.Round(time.Millisecond))
	return err
}

// backupFile is what a backup is written to.
type backupFile struct {
	w     io.Writer
	size  int64 // bytes written
	f     *os.File
	final string // "": standard output, which can not be taken back
	pipe  *bufio.Writer
}

func (o *backupFile) Write(b []byte) (int, error) {
	n, err := o.w.Write(b)
	o.size += int64(n)
	return n, err
}

func newBackupFile(cmd *cobra.Command, file string, overwrite bool) (*backupFile, error) {
	if file == "-" {
		if f, ok := cmd.OutOrStdout().(*os.File); ok && term.IsTerminal(int(f.Fd())) {
			return nil, usagef("a backup is no text: give a FILE, or send standard output elsewhere")
		}
		pipe := bufio.NewWriterSize(cmd.OutOrStdout(), 1<<16)
		return &backupFile{w: pipe, pipe: pipe}, nil
	}
	if info, err := os.Stat(file); err == nil && !info.Mode().IsRegular() {
		return nil, usagef("%s is a directory or a device: want the name of a file, or - for standard output", file)
	}
	if _, err := os.Lstat(file); err == nil && !overwrite {
		return nil, usagef("%s exists already: give another name, or --overwrite", file)
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, usageError{err}
	}
	partial := file + ".partial"
	f, err := os.OpenFile(partial, os.O_CREATE|os.O_WRONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, usageError{err}
	}
	// What another run left behind is nobody's; what it is writing is its own.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(usagef("%s is being written by another kvctl", partial), f.Close())
	}
	if err := errors.Join(f.Chmod(0o600), f.Truncate(0)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &backupFile{w: f, f: f, final: file}, nil
}

// back cuts the file to a length that it had; false where that can not be.
func (o *backupFile) back(size int64) (bool, error) {
	if o.f == nil {
		return o.size == size, nil
	}
	err := o.f.Truncate(size)
	if err == nil {
		_, err = o.f.Seek(size, io.SeekStart)
	}
	o.size = size
	return true, err
}

// done keeps the file under its name, or after an error removes it.
func (o *backupFile) done(err error) error {
	if o.f == nil {
		if err == nil {
			err = o.pipe.Flush()
		}
		return err
	}
	if err == nil {
		err = o.f.Sync()
	}
	if err == nil {
		err = os.Rename(o.f.Name(), o.final)
	}
	if err != nil {
		_ = os.Remove(o.f.Name())
		return errors.Join(err, o.f.Close())
	}
	dir, err := os.Open(filepath.Dir(o.final))
	if err == nil {
		err = errors.Join(dir.Sync(), dir.Close())
	}
	return errors.Join(err, o.f.Close())
}

// backupRun is one backup.
type backupRun struct {
	admin    *client.Admin
	out      *backupFile
	w        *backup.Writer
	progress *progress

	cluster *kvdv1.BackupCluster
	known   map[uint32]bool // namespaces in the file
	shards  []*kvdv1.BackupShard
	end     *kvdv1.BackupEnd
}

func (b *backupRun) run(ctx context.Context) (err error) {
	if b.cluster, err = b.admin.BackupCluster(ctx); err != nil {
		return err
	}
	b.progress.setTotal(b.aboutBytes(ctx))
	if b.w, err = backup.NewWriter(b.out); err != nil {
		return err
	}
	if err := b.w.Cluster(b.cluster); err != nil {
		return err
	}
	b.learn(b.cluster)
	for shard := uint32(1); shard <= b.cluster.GetShards(); shard++ {
		if err := b.shard(ctx, shard); err != nil {
			return err
		}
	}
	b.end, err = b.w.Finish()
	return err
}

func (b *backupRun) learn(c *kvdv1.BackupCluster) {
	b.known = map[uint32]bool{}
	for _, ns := range c.GetNamespaces() {
		b.known[ns.GetId()] = true
	}
}

// aboutBytes is about how much there is, for the progress alone.
func (b *backupRun) aboutBytes(ctx context.Context) (total uint64) {
	nodes, err := b.admin.Shards(ctx)
	if err != nil {
		return 0
	}
	bytes := map[uint32]uint64{}
	for _, n := range nodes {
		for _, s := range n.Replicas {
			bytes[s.GetShard()] = max(bytes[s.GetShard()], s.GetBytes())
		}
	}
	for _, n := range bytes {
		total += n
	}
	return total
}

// shard writes one shard, anew where the node that keeps it is lost on the way.
func (b *backupRun) shard(ctx context.Context, shard uint32) error {
	mark := b.w.Mark()
	for try := 1; ; try++ {
		err := b.tryShard(ctx, shard)
		if err == nil || !errors.Is(err, client.ErrExportGone) || try == exportTries {
			return err
		}
		ok, cut := b.out.back(mark.Offset)
		if cut != nil {
			return cut
		}
		if !ok {
			return fmt.Errorf("shard %d has to be begun anew, and what is written to standard output can not be taken back: run it again, or write to a file: %w", shard, err)
		}
		b.w.Rollback(mark)
		b.progress.note("shard %d is begun anew: %v", shard, err)
	}
}

func (b *backupRun) tryShard(ctx context.Context, shard uint32) error {
	e, err := b.admin.OpenExport(ctx, shard)
	if err != nil {
		return err
	}
	defer e.Close(context.WithoutCancel(ctx))
	if err := b.w.BeginShard(e.Shard); err != nil {
		return err
	}
	// One page is read while the one before it is compressed and written.
	pages := make(chan []*kvdv1.BackupItem, 1)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(pages)
		for {
			page, err := e.Next(ctx)
			if err != nil || len(page) == 0 {
				return err
			}
			select {
			case pages <- page:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	g.Go(func() error {
		for page := range pages {
			if err := b.page(ctx, page); err != nil {
				return err
			}
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	if err := b.w.EndShard(); err != nil {
		return err
	}
	b.shards = append(b.shards, e.Shard)
	b.progress.note("shard %d of %d: %d keys at index %d", shard, b.cluster.GetShards(), e.Shard.GetKeys(), e.Shard.GetIndex())
	return nil
}

func (b *backupRun) page(ctx context.Context, page []*kvdv1.BackupItem) error {
	var bytes uint64
	for _, it := range page {
		bytes += backup.ItemBytes(it)
		if b.known[it.GetNamespaceId()] {
			continue
		}
		// It was made while the backup ran.
		c, err := b.admin.BackupCluster(ctx)
		if err != nil {
			return err
		}
		if b.learn(c); !b.known[it.GetNamespaceId()] {
			return fmt.Errorf("key %q is in a namespace with id %d, which the cluster does not know", it.GetKey(), it.GetNamespaceId())
		}
		if err := b.w.Namespaces(c); err != nil {
			return err
		}
		b.cluster.Namespaces = c.GetNamespaces()
	}
	if err := b.w.Items(page); err != nil {
		return err
	}
	b.progress.add(bytes)
	return nil
}
