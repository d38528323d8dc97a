package lint

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
)

const modulePath = "github.com/kvd-io/kvd"

// source is one Go file. Files of every build tag and system are read: a rule
// holds on the machines that this one is not, too.
type source struct {
	name      string // relative to the module's root, with slashes
	pkg       string // its folder, also the package path within the module
	text      []byte
	ast       *ast.File
	test      bool
	generated bool
}

// module is what the rules look at.
type module struct {
	fset  *token.FileSet
	files []*source         // sorted by name
	texts map[string][]byte // every tracked file, Go or not
}

// finding is one broken rule at one place, as a sentence.
type finding string

func (m *module) at(pos token.Pos, format string, args ...any) finding {
	p := m.fset.Position(pos)
	return finding(fmt.Sprintf("%s:%d: ", p.Filename, p.Line) + fmt.Sprintf(format, args...))
}

func (m *module) inFile(name, format string, args ...any) finding {
	return finding(name + ": " + fmt.Sprintf(format, args...))
}

// load reads the module at root.
func load(root string) (*module, error) {
	names, err := trackedFiles(root)
	if err != nil {
		return nil, err
	}
	texts := map[string][]byte{}
	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed, and the removal is not committed yet
		}
		if err != nil {
			return nil, err
		}
		texts[name] = text
	}
	return parse(texts)
}

func parse(texts map[string][]byte) (*module, error) {
	m := &module{fset: token.NewFileSet(), texts: texts}
	for name, text := range texts {
		if path.Ext(name) != ".go" || strings.Contains("/"+name, "/testdata/") {
			continue
		}
		file, err := parser.ParseFile(m.fset, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		m.files = append(m.files, &source{
			name:      name,
			pkg:       path.Dir(name),
			text:      text,
			ast:       file,
			test:      strings.HasSuffix(name, "_test.go"),
			generated: ast.IsGenerated(file),
		})
	}
	sort.Slice(m.files, func(i, j int) bool { return m.files[i].name < m.files[j].name })
	return m, nil
}

// trackedFiles asks git for what is tracked or would be (new and not ignored).
// Without git (a source archive) it is every file that is not a build product.
func trackedFiles(root string) ([]string, error) {
	cmd := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	cmd.Dir = root
	if out, err := cmd.Output(); err == nil {
		names := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
		sort.Strings(names)
		return names, nil
	}
	var names []string
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			if rel == ".git" || rel == "bin" || rel == "artifacts" {
				return filepath.SkipDir
			}
			return nil
		}
		if d.Type().IsRegular() {
			names = append(names, rel)
		}
		return nil
	})
	return names, err
}

// imports of a file: path to the position of the import.
func (s *source) imports() map[string]token.Pos {
	out := map[string]token.Pos{}
	for _, spec := range s.ast.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err == nil {
			out[p] = spec.Pos()
		}
	}
	return out
}

// localName is the name under which the file uses an import, "" where it does not
// import it.
func (s *source) localName(importPath string) string {
	for _, spec := range s.ast.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil || p != importPath {
			continue
		}
		if spec.Name != nil {
			return spec.Name.Name
		}
		return path.Base(importPath)
	}
	return ""
}

// calls visits the calls of pkg.Func in the file, for a package by import path.
func (s *source) calls(importPath string, visit func(fn string, pos token.Pos)) {
	local := s.localName(importPath)
	if local == "" {
		return
	}
	ast.Inspect(s.ast, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if sel, ok := call.Fun.(*ast.SelectorExpr); ok {
			if id, ok := sel.X.(*ast.Ident); ok && id.Name == local {
				visit(sel.Sel.Name, call.Pos())
			}
		}
		return true
	})
}

// within tells whether package pkg is root or below it.
func within(pkg, root string) bool {
	return pkg == root || strings.HasPrefix(pkg, root+"/")
}

func withinAny(pkg string, roots ...string) bool {
	for _, r := range roots {
		if within(pkg, r) {
			return true
		}
	}
	return false
}

// lines counts the lines of a text.
func lines(text []byte) int { return bytes.Count(text, []byte("\n")) }
