// Messages without bytes: a SEND whose immediate is all there is, and room for one.
#include <stdint.h>

int kvd_post_message(uintptr_t qp, uint64_t id, uint32_t imm);
int kvd_post_recv(uintptr_t qp, uint64_t id);
int kvd_post_word(uintptr_t qp, uint64_t id, const uint8_t *word, int len);
int kvd_post_recv_into(uintptr_t qp, uint64_t id, uint64_t addr, uint32_t length, uint32_t lkey);
int kvd_arm_solicited(uintptr_t cq);
