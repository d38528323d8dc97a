//go:build !linux || !cgo

package ibv

func cPostMessage(uintptr, uint64, uint32) errnoT { return noShim }
func cPostRecv(uintptr, uint64) errnoT            { return noShim }
func cArmSolicited(uintptr) errnoT                { return noShim }

func cPostWord(uintptr, uint64, []byte) errnoT { return noShim }

func cPostRecvInto(uintptr, uint64, uint64, uint32, uint32) errnoT { return noShim }
