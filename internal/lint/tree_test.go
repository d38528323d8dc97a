package lint

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"regexp"
	"sort"
	"strings"
)

// machinePaths are folders of one developer's machine. They are put together here
// so that this file does not contain them.
var machinePaths = []string{"/wo" + "rk/", "/tmp/" + "kvd/"}

// noMachinePaths: nothing in the tree may point at a place that exists on one
// machine only.
func noMachinePaths(m *module) []finding {
	var out []finding
	for name, text := range m.texts {
		if bytes.IndexByte(text[:min(len(text), 8000)], 0) >= 0 {
			continue // binary
		}
		for i, line := range strings.Split(string(text), "\n") {
			for _, p := range machinePaths {
				if startsPath(line, p) {
					out = append(out, m.inFile(name, "line %d names the path %s, which other machines do not have", i+1, p))
				}
			}
		}
	}
	return out
}

// startsPath: p occurs in line as the start of an absolute path, not within another
// path or a URL.
func startsPath(line, p string) bool {
	for {
		i := strings.Index(line, p)
		if i < 0 {
			return false
		}
		if i == 0 || !regexp.MustCompile(`[\w.~)}\-]`).MatchString(line[i-1:i]) {
			return true
		}
		line = line[i+len(p):]
	}
}

// goMod is the part of `go mod edit -json` that is looked at.
type goMod struct {
	Require []struct {
		Path     string
		Indirect bool
	}
	Tool []struct{ Path string }
}

func readGoMod(root string) (goMod, error) {
	var mod goMod
	cmd := exec.Command("go", "mod", "edit", "-json")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		return mod, err
	}
	return mod, json.Unmarshal(out, &mod)
}

// adrModule finds the modules that a decision record gives a reason for: the first
// cell of a table row, in backquotes.
var adrModule = regexp.MustCompile("(?m)^\\| `([^`]+)` \\|")

// dependencies: every module that we require directly, and every tool, has its
// reason in docs/adr; a reason whose module is gone goes too.
func dependencies(m *module, mod goMod) []finding {
	listed := map[string]string{}
	for name, text := range m.texts {
		if strings.HasPrefix(name, "docs/adr/") && strings.HasSuffix(name, ".md") {
			for _, match := range adrModule.FindAllSubmatch(text, -1) {
				listed[string(match[1])] = name
			}
		}
	}
	var out []finding
	used := map[string]bool{}
	for _, r := range mod.Require {
		if r.Indirect {
			continue
		}
		used[r.Path] = true
		if listed[r.Path] == "" {
			out = append(out, m.inFile("go.mod", "module %s has no reason: add a row to docs/adr/0001-dependencies.md (why, licence, alive), or do without it", r.Path))
		}
	}
	for _, t := range mod.Tool {
		reason := false
		for p := range listed {
			if within(t.Path, p) {
				used[p] = true
				reason = true
			}
		}
		if !reason {
			out = append(out, m.inFile("go.mod", "tool %s has no reason: add a row to docs/adr/0001-dependencies.md", t.Path))
		}
	}
	var names []string
	for p := range listed {
		names = append(names, p)
	}
	sort.Strings(names)
	for _, p := range names {
		if !used[p] {
			out = append(out, m.inFile(listed[p], "gives a reason for %s, which go.mod does not require directly: remove the row", p))
		}
	}
	return out
}
