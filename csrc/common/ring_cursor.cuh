// A position in a ring of slots in shared memory, whose barriers change parity with every turn.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace hf_fastpath {

struct RingCursor {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

}  // namespace hf_fastpath
