//go:build e2e

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// readmeBlock is the code block of the README behind the mark `<!-- test: NAME -->`.
func readmeBlock(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(moduleRoot, "README.md"))
	require.NoError(t, err)
	m := regexp.MustCompile("(?s)<!-- test: " + regexp.QuoteMeta(name) + " -->\n```[a-z]+\n(.*?)```\n").FindSubmatch(b)
	require.NotNil(t, m, "README.md has no block marked %q", name)
	return string(m[1])
}

// runReadme runs a program in an environment as the README asks for.
func (c *cluster) runReadme(t testing.TB, dir, name string, args ...string) result {
	t.Helper()
	path, err := exec.LookPath(name)
	require.NoError(t, err)
	r := command{bin: "/usr/bin/env", args: append([]string{"-C", dir, path}, args...), limit: 2 * patience, env: []string{
		"PATH=" + filepath.Dir(kvctlBin) + string(os.PathListSeparator) + os.Getenv("PATH"),
		"KVD_ENDPOINTS=" + strings.Join(c.Endpoints(), ","),
	}}.run(t)
	return r
}

// TestReadmeKvctl runs the README's kvctl lines one by one in one shell and compares what
// their comments claim.
func TestReadmeKvctl(t *testing.T) {
	c := sharedNodes(t)
	block := readmeBlock(t, "kvctl")
	dir := tempDir(t)
	// A mark behind each line tells which output belongs to it.
	const mark = "=== line done"
	var script strings.Builder
	script.WriteString("set -e -o pipefail\n")
	lines := strings.Split(strings.TrimRight(block, "\n"), "\n")
	for _, line := range lines {
		script.WriteString(line + "\necho; echo '" + mark + "'\n")
	}
	r := c.runReadme(t, dir, "bash", "-c", script.String())
	require.Zero(t, r.code, "%s\n%s", r.stdout, r.stderr)
	outputs := strings.Split(r.stdout, "\n"+mark+"\n")
	require.Len(t, outputs, len(lines)+1)
	claims := 0
	for i, line := range lines {
		out := strings.TrimSpace(outputs[i])
		command, comment, _ := strings.Cut(line, "#")
		switch comment = strings.TrimSpace(comment); {
		case comment == "prints the version":
			require.Regexp(t, `^\d+$`, out, line)
		case strings.HasPrefix(comment, "raw bytes: "):
			require.Equal(t, strings.TrimPrefix(comment, "raw bytes: "), out, line)
		case regexp.MustCompile(`^\d: `).MatchString(comment):
			require.Equal(t, "exit code "+comment[:1], out, line)
			what := strings.Fields(comment[2:])[0]
			require.Contains(t, r.stderr, what, line)
		default:
			require.Empty(t, comment, "no test knows what this comment claims: %s", line)
			if strings.HasPrefix(command, "kvctl put") {
				require.Regexp(t, `^\d+$|^exit code`, out, line)
			}
			continue
		}
		claims++
	}
	require.GreaterOrEqual(t, claims, 4, "the README's comments claim something")
	require.Contains(t, outputs[indexOf(t, lines, "kvctl ls blobs/")], "blobs/random")
	require.Contains(t, outputs[indexOf(t, lines, "kvctl status")], "serving")
}

func indexOf(t testing.TB, lines []string, line string) int {
	t.Helper()
	for i, l := range lines {
		if l == line {
			return i
		}
	}
	t.Fatalf("the README has no line %q", line)
	return 0
}

// TestReadmeSDK compiles and runs the README's program.
func TestReadmeSDK(t *testing.T) {
	c := sharedNodes(t)
	root, err := filepath.Abs(moduleRoot)
	require.NoError(t, err)
	file := filepath.Join(tempDir(t), "main.go")
	require.NoError(t, os.WriteFile(file, []byte(readmeBlock(t, "sdk")), 0o600))
	r := c.runReadme(t, root, "go", "run", file)
	require.Zero(t, r.code, r.text())
	require.Regexp(t, `^step 42, version \d+\n`+
		`0 42 false\n`+
		`1  true\n`+
		`model/step has 2 bytes\n`+
		`3 gets, \d+ READs, \d+ confirmations\n$`, r.stdout)
}
