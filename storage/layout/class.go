package layout

import "math/bits"

// Class numbers a size class, 1..MaxClass. 0 is no class.
//
// Up to 512 bytes classes are 8 bytes apart; from there to 32 KiB there are 8 in
// each doubling (at most 12.5 % unused), above 16 (at most 6.25 %). All sizes above
// 512 are multiples of 64, those above 32 KiB multiples of 2 KiB.
type Class uint8

const (
	minClassSize   = 40  // header and one byte of key, rounded up
	linearLimit    = 512 // bytes; last class of the linear part
	linearClasses  = (linearLimit-minClassSize)/8 + 1
	slabLimit      = 32 << 10 // bytes; last class whose objects share slabs
	midPerDoubling = 8
	midClasses     = 6 * midPerDoubling // 512 -> 32 KiB
	topPerDoubling = 16
	topClasses     = 9 * topPerDoubling // 32 KiB -> 16 MiB

	// MaxSlabClass is the largest class whose objects share slabs; larger objects
	// have a run of pages for themselves.
	MaxSlabClass Class = linearClasses + midClasses
	// MaxClass is the largest class.
	MaxClass Class = linearClasses + midClasses + topClasses
)

// ClassSize is the size in bytes of the class's blocks, 0 for no class.
func ClassSize(c Class) int {
	switch {
	case c == 0 || c > MaxClass:
		return 0
	case c <= linearClasses:
		return minClassSize + 8*(int(c)-1)
	case c <= MaxSlabClass:
		return stepSize(int(c)-linearClasses-1, linearLimit, midPerDoubling)
	default:
		return stepSize(int(c)-int(MaxSlabClass)-1, slabLimit, topPerDoubling)
	}
}

// stepSize is the size of step i (from 0) above base with n steps a doubling.
func stepSize(i, base, n int) int {
	start := base << (i / n)
	return start + start/n*(i%n+1)
}

// ClassFor is the smallest class that holds size bytes; 0 where none does.
func ClassFor(size int) Class {
	switch {
	case size <= 0 || size > MaxObjectSize:
		return 0
	case size <= minClassSize:
		return 1
	case size <= linearLimit:
		return Class((size-minClassSize+7)/8 + 1)
	case size <= slabLimit:
		return Class(linearClasses + stepFor(size, linearLimit, midPerDoubling) + 1)
	default:
		return MaxSlabClass + Class(stepFor(size, slabLimit, topPerDoubling)+1)
	}
}

func stepFor(size, base, n int) int {
	doubling := bits.Len(uint((size-1)/base)) - 1
	start := base << doubling
	step := start / n
	return doubling*n + (size-start+step-1)/step - 1
}
