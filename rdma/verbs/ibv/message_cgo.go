//go:build linux && cgo

package ibv

/*
#cgo nocallback kvd_post_message
#cgo nocallback kvd_post_recv
#cgo noescape kvd_post_word
#cgo nocallback kvd_post_word
#cgo nocallback kvd_arm_solicited

#include "message.h"
*/
import "C"

import "unsafe"

func cPostMessage(qp uintptr, id uint64, imm uint32) errnoT {
	return no(C.kvd_post_message(C.uintptr_t(qp), C.uint64_t(id), C.uint32_t(imm)))
}

func cPostRecv(qp uintptr, id uint64) errnoT {
	return no(C.kvd_post_recv(C.uintptr_t(qp), C.uint64_t(id)))
}

func cArmSolicited(cq uintptr) errnoT { return no(C.kvd_arm_solicited(C.uintptr_t(cq))) }

func cPostWord(qp uintptr, id uint64, word []byte) errnoT {
	return no(C.kvd_post_word(C.uintptr_t(qp), C.uint64_t(id), (*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(word))), C.int(len(word))))
}

func cPostRecvInto(qp uintptr, id, addr uint64, length, lkey uint32) errnoT {
	return no(C.kvd_post_recv_into(C.uintptr_t(qp), C.uint64_t(id), C.uint64_t(addr), C.uint32_t(length), C.uint32_t(lkey)))
}
