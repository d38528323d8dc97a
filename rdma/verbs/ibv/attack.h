// For test builds only (build tag rdmaguest).
#include <stdint.h>

int kvd_post_attack(uintptr_t qp, int kind, uint64_t id, uint64_t local_addr, uint32_t length, uint32_t lkey, uint64_t remote_addr, uint32_t rkey);
