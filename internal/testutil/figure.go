package testutil

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Figure is what a test measured. A time or a rate on emulated devices says something
// only beside another of the same boot: Base is that other one.
type Figure struct {
	What  string  // such as "READ of 64 B, p50"
	Value float64 // in Unit
	Unit  string
	Than  string  // what Base is a figure of; "" for none
	Base  float64 // in Unit
	// AtMost and AtLeast bound the ratio Value/Base, or Value where there is no Base;
	// zero for no bound. They are printed. Whether a miss fails a test is its own matter.
	AtMost, AtLeast float64
}

// Ratio of Value to Base; Value itself where there is no Base.
func (f Figure) Ratio() float64 {
	if f.Base == 0 {
		return f.Value
	}
	return f.Value / f.Base
}

// Met tells whether the ratio lies within the bounds.
func (f Figure) Met() bool {
	r := f.Ratio()
	return (f.AtMost == 0 || r <= f.AtMost) && (f.AtLeast == 0 || r >= f.AtLeast)
}

func (f Figure) String() string {
	s := fmt.Sprintf("%s: %.4g %s", f.What, f.Value, f.Unit)
	if f.Base != 0 {
		s += fmt.Sprintf(", %s %.4g: ratio %.2f", f.Than, f.Base, f.Ratio())
	}
	return s
}

// Record logs the figure and, in a guest of rdmaguest, leaves it for the table that
// make test-rdma prints at its end.
func (f Figure) Record(t testing.TB) {
	t.Helper()
	t.Log(f)
	dir := os.Getenv("KVD_GUEST_OUT")
	if dir == "" {
		return
	}
	line, err := json.Marshal(struct {
		Test string
		Figure
	}{t.Name(), f})
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.OpenFile(filepath.Join(dir, "figures.jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := out.Write(append(line, '\n')); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
}
