package verbsflags

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma/verbs"
)

// The table of settings in docs/rdma.md has every flag once, and none that there is not.
func TestDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/rdma.md")
	require.NoError(t, err)
	var documented, defined []string
	for _, m := range regexp.MustCompile("(?m)^\\| `--("+Prefix+"[a-z-]+)` \\|").FindAllSubmatch(text, -1) {
		documented = append(documented, string(m[1]))
	}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	Define(fs, &verbs.Provider{})
	fs.VisitAll(func(f *pflag.Flag) { defined = append(defined, f.Name) })
	slices.Sort(documented)
	require.Equal(t, defined, documented)
	for _, m := range regexp.MustCompile("--("+Prefix+"[a-z-]+)").FindAllSubmatch(text, -1) {
		require.Contains(t, defined, string(m[1]))
	}
}
