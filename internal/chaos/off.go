//go:build !chaos

package chaos

// Enabled tells whether this program can be broken.
const Enabled = false

// Broken tells whether a variant is on.
func Broken(Variant) bool { return false }

// Linger makes the moment between two steps of a broken variant long enough to be met.
func Linger() {}

// Later keeps what a broken variant does too late, until RunLater of the same key.
func Later(any, func()) {}

// RunLater does, in order, what was kept for the key.
func RunLater(any) {}
