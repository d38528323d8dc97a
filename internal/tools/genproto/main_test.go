package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The generated code that is checked in is what today's .proto files and plugins
// give: no file differs, none is missing, none is left over.
func TestGeneratedCodeIsCurrent(t *testing.T) {
	t.Chdir("../../..")
	fresh := t.TempDir()
	require.NoError(t, run(t.Context(), fresh))

	want := generated(t, filepath.Join(fresh, "api"))
	got := generated(t, "api")
	require.NotEmpty(t, want)
	for name, text := range want {
		require.Contains(t, got, name, "api/%s is missing: run `go run ./internal/tools/genproto`", name)
		if got[name] != text {
			t.Errorf("api/%s is not what its .proto file gives: run `go run ./internal/tools/genproto` and commit the result", name)
		}
	}
	for name := range got {
		require.Contains(t, want, name, "api/%s comes from no .proto file: remove it", name)
	}
}

// generated maps the names of the *.pb.go files below root, relative to it, to
// their text.
func generated(t *testing.T, root string) map[string]string {
	t.Helper()
	files := map[string]string{}
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if ok, err := filepath.Match("*.pb.go", d.Name()); err != nil || !ok {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		text, err := os.ReadFile(path)
		files[filepath.ToSlash(name)] = string(text)
		return err
	}))
	return files
}
