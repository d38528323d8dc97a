package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// sayEvery is the pause between two lines about the progress.
const sayEvery = 5 * time.Second

// progress of bytes: a bar where a person watches, and a line now and then where not.
type progress struct {
	out   io.Writer
	title string
	tty   bool

	mu    sync.Mutex
	bar   *progressbar.ProgressBar
	total uint64 // 0: not known
	done  uint64
	said  time.Time
}

func newProgress(out io.Writer, title string) *progress {
	p := &progress{out: out, title: title, said: time.Now()}
	if f, ok := out.(*os.File); ok {
		p.tty = term.IsTerminal(int(f.Fd()))
	}
	return p
}

// setTotal begins anew with so many bytes to come; 0: nobody knows.
func (p *progress) setTotal(bytes uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total, p.done = bytes, 0
	if !p.tty {
		return
	}
	total := int64(bytes)
	if total == 0 {
		total = -1
	}
	p.bar = progressbar.NewOptions64(total, progressbar.OptionSetWriter(p.out), progressbar.OptionSetDescription(p.title),
		progressbar.OptionShowBytes(true), progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
}

func (p *progress) add(bytes uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += bytes
	if p.bar != nil {
		if p.total > 0 && p.done > p.total { // there is more than was thought
			p.total = p.done
			p.bar.ChangeMax64(int64(p.done) + 1)
		}
		_ = p.bar.Set64(int64(p.done)) // a bar that can not be drawn is no reason to stop
		return
	}
	p.sayLocked("%s", p.shareLocked())
}

func (p *progress) shareLocked() string {
	if p.total == 0 {
		return humanize.IBytes(p.done)
	}
	return fmt.Sprintf("%s of about %s", humanize.IBytes(p.done), humanize.IBytes(max(p.total, p.done)))
}

// note says where the work is, unless something was said a moment ago.
func (p *progress) note(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bar == nil {
		p.sayLocked("%s; %s", fmt.Sprintf(format, args...), p.shareLocked())
	}
}

func (p *progress) sayLocked(format string, args ...any) {
	if time.Since(p.said) < sayEvery {
		return
	}
	p.said = time.Now()
	_, _ = fmt.Fprintf(p.out, "%s: %s\n", p.title, fmt.Sprintf(format, args...))
}

func (p *progress) finish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bar != nil {
		_ = p.bar.Finish()
		p.bar = nil
	}
}
