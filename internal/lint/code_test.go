package lint

import (
	"go/ast"
	"go/token"
	"path"
	"regexp"
	"strings"
)

// maxLines of a Go file written by hand.
const maxLines = 800

// sleepless packages wait for conditions in their tests, never for time: a sleep is
// slow when it is right and flaky when it is wrong.
var sleepless = []string{"raft", "storage", "server", "rdma", "client"}

// sleepExceptions maps a file to the reason why a sleep in it is not used as
// synchronisation. An entry whose file has no sleep (any more) is a finding.
var sleepExceptions = map[string]string{}

func noSleepInTests(m *module) []finding { return sleepsIn(m, sleepExceptions) }

func sleepsIn(m *module, exceptions map[string]string) []finding {
	var out []finding
	used := map[string]bool{}
	for _, f := range m.files {
		if !f.test || !withinAny(f.pkg, sleepless...) {
			continue
		}
		f.calls("time", func(fn string, pos token.Pos) {
			if fn != "Sleep" {
				return
			}
			if _, ok := exceptions[f.name]; ok {
				used[f.name] = true
				return
			}
			out = append(out, m.at(pos, "time.Sleep in a test: wait for the condition with a deadline, or use a manual clock"))
		})
	}
	for name := range exceptions {
		if !used[name] {
			out = append(out, m.inFile(name, "listed in sleepExceptions, but has no time.Sleep: take it off the list"))
		}
	}
	return out
}

// rawAtomics are the packages which work on memory shared with a NIC or another
// process: its words are plain bytes, so the typed atomics cannot be laid over them
// without unsafe. Everywhere else a typed atomic says what the word is.
var rawAtomics = map[string]string{
	"storage/layout": "encodes and decodes the words of registered memory",
	"storage/arena":  "writes registered memory that peers read meanwhile",
	"rdma":           "defines how exposed memory is loaded and stored",
	"rdma/shm":       "reads another process's memory in place",
	"rdma/tcp":       "serves READs out of memory that the arena writes meanwhile",
	"rdma/simnic":    "copies registered memory word by word, as a NIC would",
	"rdma/rdmatest":  "plays the writer of registered memory",
	"rdma/verbs":     "reads and writes words that a NIC shares",
}

var rawAtomicFunc = regexp.MustCompile(`^(Load|Store|Add|Swap|CompareAndSwap|And|Or)(Int32|Int64|Uint32|Uint64|Uintptr|Pointer)$`)

func typedAtomics(m *module) []finding {
	var out []finding
	for _, f := range m.files {
		if _, ok := rawAtomics[f.pkg]; ok {
			continue
		}
		f.calls("sync/atomic", func(fn string, pos token.Pos) {
			if rawAtomicFunc.MatchString(fn) {
				out = append(out, m.at(pos, "atomic.%s on a plain integer: use a typed atomic (atomic.Uint64 and so on)", fn))
			}
		})
	}
	return out
}

// panicExceptions are files whose panics never leave the package, with the reason.
var panicExceptions = map[string]string{
	"raft/logger.go": "etcd's raft wants Fatal and Panic of its logger not to return; the host recovers this one type and fails the one group",
}

// panicsAreBugs: a panic says that this program is wrong, so it says which rule was
// broken: by a message "package: ..." of its own, or by a comment `// bug: ...` on its
// line or the line above. What an error value brings comes from a peer, a disk, a
// device or a user, and is returned: a panic made of one needs the comment.
func panicsAreBugs(m *module) []finding {
	var out []finding
	for _, f := range m.files {
		if f.test || f.generated || within(f.pkg, internalTools) || panicExceptions[f.name] != "" {
			continue
		}
		reasons := map[int]bool{} // lines with a reason
		for _, group := range f.ast.Comments {
			for _, c := range group.List {
				if strings.Contains(c.Text, "bug: ") {
					// A reason may run over several lines; its last line counts.
					reasons[m.fset.Position(c.Pos()).Line] = true
					reasons[m.fset.Position(group.End()).Line] = true
				}
			}
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			if id, ok := call.Fun.(*ast.Ident); !ok || id.Name != "panic" {
				return true
			}
			line := m.fset.Position(call.Pos()).Line
			if !reasons[line] && !reasons[line-1] && !namesRule(call, f.ast.Name.Name) {
				out = append(out, m.at(call.Pos(), "panic without a reason: return an error, or, if only a bug of ours leads here, say which rule was broken (\"%s: ...\", or a comment `// bug: ...`)", f.ast.Name.Name))
			}
			return true
		})
	}
	return out
}

// namesRule: the panic's message is a literal that starts with the package's name,
// filled in (if at all) with values none of which is called err.
func namesRule(call *ast.CallExpr, pkg string) bool {
	named, fault := false, false
	for _, arg := range call.Args {
		ast.Inspect(arg, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.BasicLit:
				if n.Kind == token.STRING && strings.HasPrefix(n.Value[1:], pkg+": ") {
					named = true
				}
			case *ast.Ident:
				if n.Name == "err" {
					fault = true
				}
			}
			return true
		})
	}
	return named && !fault
}

// exitInMain: a library returns errors and logs through its Config; only a program
// decides to exit or where its log goes.
func exitInMain(m *module) []finding {
	var out []finding
	for _, f := range m.files {
		if f.ast.Name.Name == "main" || f.generated || f.test {
			continue
		}
		f.calls("os", func(fn string, pos token.Pos) {
			if fn == "Exit" {
				out = append(out, m.at(pos, "os.Exit outside package main: return an error"))
			}
		})
		if pos, ok := f.imports()["log"]; ok {
			out = append(out, m.at(pos, "package log is global: take a *slog.Logger from Config"))
		}
		f.calls("log/slog", func(fn string, pos token.Pos) {
			switch fn {
			case "Debug", "Info", "Warn", "Error", "Log", "SetDefault",
				"DebugContext", "InfoContext", "WarnContext", "ErrorContext":
				out = append(out, m.at(pos, "slog.%s uses the global logger: take a *slog.Logger from Config", fn))
			}
		})
	}
	return out
}

// sentinels: an exported error variable is called Err... and says when it occurs.
func sentinels(m *module) []finding {
	var out []finding
	for _, f := range m.files {
		if f.test || f.generated {
			continue
		}
		for _, decl := range f.ast.Decls {
			gen, ok := decl.(*ast.GenDecl)
			if !ok || gen.Tok != token.VAR {
				continue
			}
			for _, spec := range gen.Specs {
				vs := spec.(*ast.ValueSpec)
				for i, name := range vs.Names {
					if !name.IsExported() || !(isErrorVar(f, vs, i) || strings.HasPrefix(name.Name, "Err")) {
						continue
					}
					if !strings.HasPrefix(name.Name, "Err") {
						out = append(out, m.at(name.Pos(), "exported error %s: its name must start with Err", name.Name))
					}
					alone := len(gen.Specs) == 1 && gen.Doc != nil
					if vs.Doc == nil && vs.Comment == nil && !alone {
						out = append(out, m.at(name.Pos(), "%s has no comment: say when it occurs and what the caller may do", name.Name))
					}
				}
			}
		}
	}
	return out
}

// isErrorVar: declared as error, or made by errors.New or fmt.Errorf.
func isErrorVar(f *source, vs *ast.ValueSpec, i int) bool {
	if id, ok := vs.Type.(*ast.Ident); ok && id.Name == "error" {
		return true
	}
	if i >= len(vs.Values) {
		return false
	}
	call, ok := vs.Values[i].(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	id, ok := sel.X.(*ast.Ident)
	if !ok {
		return false
	}
	return (id.Name == f.localName("errors") && sel.Sel.Name == "New") ||
		(id.Name == f.localName("fmt") && sel.Sel.Name == "Errorf")
}

// packageComments: exactly one a package, so that there is one place to read.
func packageComments(m *module) []finding {
	docs := map[string][]string{} // package to the files with a comment
	first := map[string]string{}
	for _, f := range m.files {
		if f.test {
			continue
		}
		if _, ok := first[f.pkg]; !ok {
			first[f.pkg] = f.name
			docs[f.pkg] = nil
		}
		if f.ast.Doc != nil && strings.TrimSpace(f.ast.Doc.Text()) != "" {
			docs[f.pkg] = append(docs[f.pkg], path.Base(f.name))
		}
	}
	var out []finding
	for pkg, files := range docs {
		switch len(files) {
		case 1:
		case 0:
			out = append(out, m.inFile(first[pkg], "package %s has no package comment: put one in doc.go", pkg))
		default:
			out = append(out, m.inFile(first[pkg], "package %s has %d package comments (%s): keep one, separate the others from the package clause by an empty line",
				pkg, len(files), strings.Join(files, ", ")))
		}
	}
	return out
}

// fileSize: one concept a file.
func fileSize(m *module) []finding {
	var out []finding
	for _, f := range m.files {
		if n := lines(f.text); n > maxLines && !f.generated {
			out = append(out, m.inFile(f.name, "%d lines, at most %d wanted: split it by concept", n, maxLines))
		}
	}
	return out
}
