package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// A setting has one name. As a flag it is --max-value-bytes, in a file
// max-value-bytes, in the environment KVD_MAX_VALUE_BYTES. A flag wins over the
// environment, the environment over the file, the file over the default.

const envPrefix = "KVD_"

func envName(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// loadSettings fills in, from the environment and the file, the flags that were not
// given. It returns the names of KVD_ variables that mean nothing here: under
// Kubernetes a service called kvd puts some into every pod, so they are no error.
func loadSettings(fs *pflag.FlagSet, file string, environ []string) (strange []string, err error) {
	given := map[string]bool{}
	fs.Visit(func(f *pflag.Flag) { given[f.Name] = true })
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, envPrefix) || name == envName("config") || name == envName("endpoints") {
			continue // not ours, read elsewhere, or kvctl's
		}
		f := fs.Lookup(strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(name, envPrefix)), "_", "-"))
		if f == nil {
			strange = append(strange, name)
			continue
		}
		if given[f.Name] {
			continue
		}
		if err := fs.Set(f.Name, value); err != nil {
			return nil, usageError{fmt.Errorf("%s=%q: %w", name, value, refusal(err))}
		}
		given[f.Name] = true
	}
	sort.Strings(strange)
	if file == "" {
		return strange, nil
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, usageError{fmt.Errorf("configuration file: %w", err)}
	}
	return strange, loadFile(fs, given, file, content)
}

func loadFile(fs *pflag.FlagSet, given map[string]bool, file string, content []byte) error {
	at := func(n *yaml.Node, format string, args ...any) error {
		return usageError{fmt.Errorf("%s:%d: %s", file, n.Line, fmt.Sprintf(format, args...))}
	}
	dec := yaml.NewDecoder(strings.NewReader(string(content)))
	var doc yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return nil
	} else if err != nil {
		return usageError{fmt.Errorf("%s: %w", file, err)}
	}
	if err := dec.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return usageError{fmt.Errorf("%s: more than one document: want one", file)}
	}
	top := doc.Content[0]
	if top.Kind == yaml.ScalarNode && top.Tag == "!!null" {
		return nil
	}
	if top.Kind != yaml.MappingNode {
		return at(top, "want settings, one `name: value` a line")
	}
	l := fileLoader{fs: fs, given: given, seen: map[string]int{}, at: at}
	return l.load(top, "")
}

// fileLoader sets flags from a file's settings.
type fileLoader struct {
	fs    *pflag.FlagSet
	given map[string]bool // flags that were set elsewhere, with more weight
	seen  map[string]int  // lines, by flag
	at    func(n *yaml.Node, format string, args ...any) error
}

// load takes the settings of a mapping, whose names all begin with prefix.
func (l fileLoader) load(top *yaml.Node, prefix string) error {
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		name := prefix + key.Value
		if value.Kind == yaml.MappingNode && prefix == "" && slices.Contains(sections, name) {
			if err := l.load(value, name+"-"); err != nil {
				return err
			}
			continue
		}
		f := l.fs.Lookup(name)
		if f == nil || f.Name == "config" || f.Name == "help" {
			return l.at(key, "unknown setting %q%s: kvd start --help lists them", name, suggestion(l.fs, name))
		}
		if line, twice := l.seen[f.Name]; twice {
			return l.at(key, "%s was set in line %d already", f.Name, line)
		}
		l.seen[f.Name] = key.Line
		text, err := scalar(value)
		if err != nil {
			return l.at(value, "%s: %v", f.Name, err)
		}
		if l.given[f.Name] {
			continue
		}
		if err := l.fs.Set(f.Name, text); err != nil {
			return l.at(value, "%s: %q: %v", f.Name, text, refusal(err))
		}
	}
	return nil
}

// refusal is why a value does not fit, without pflag's words for a flag of the command
// line: the setting came from elsewhere, and has been named already.
func refusal(err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		return invalid.Unwrap()
	}
	return err
}

// sections of a file: below rdma:, devices: means rdma-devices.
var sections = []string{"rdma", "shm", "tcp", "tls"}

// scalar turns a YAML value into what the flag takes: lists are joined by commas.
func scalar(n *yaml.Node) (string, error) {
	switch n.Kind {
	case yaml.ScalarNode:
		return n.Value, nil
	case yaml.SequenceNode:
		var parts []string
		for _, c := range n.Content {
			if c.Kind != yaml.ScalarNode {
				return "", errors.New("want a list of plain values")
			}
			parts = append(parts, c.Value)
		}
		return strings.Join(parts, ","), nil
	}
	return "", errors.New("want a plain value or a list of them")
}

// suggestion names the setting that differs only in dashes, underscores and case.
func suggestion(fs *pflag.FlagSet, name string) string {
	plain := func(s string) string {
		return strings.NewReplacer("-", "", "_", "", ".", "").Replace(strings.ToLower(s))
	}
	found := ""
	fs.VisitAll(func(f *pflag.Flag) {
		if plain(f.Name) == plain(name) {
			found = fmt.Sprintf(" (did you mean %q?)", f.Name)
		}
	})
	return found
}

// bytesValue is a flag that takes 64MiB, 1GB, 4096.
type bytesValue uint64

func newBytes(p *uint64, def uint64) *bytesValue {
	*p = def
	return (*bytesValue)(p)
}

func (b *bytesValue) String() string {
	n := uint64(*b)
	if n == 0 {
		return "0"
	}
	if n%1024 == 0 {
		return strings.ReplaceAll(humanize.IBytes(n), " ", "")
	}
	return strconv.FormatUint(n, 10)
}

func (b *bytesValue) Set(s string) error {
	n, err := humanize.ParseBytes(s)
	if err != nil {
		return errors.New("want a size such as 64MiB, 1GB or 4096")
	}
	*b = bytesValue(n)
	return nil
}

func (b *bytesValue) Type() string { return "size" }
