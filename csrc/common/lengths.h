// Lengths of sequences, which lie where nobody on the host looks at them: kernels bound them, so that no
// length, and no start of one, leads outside a buffer.
#pragma once

#include <cstdint>

namespace hf_fastpath {

// Positions of a sequence, at most; a ring has fewer slots. The numbers above are left for positions behind
// the last one, which kernels count but never touch.
constexpr int kMostPositions = INT32_MAX - 0xffff;

// Positions a token sees, as kernels take it: 0 for all, which the longest windows are, too.
inline int bounded_window(int64_t window) {
  return window > 0 && window < kMostPositions ? static_cast<int>(window) : 0;
}

#ifdef __CUDACC__
__device__ __forceinline__ int bounded_length(int length, int most = kMostPositions) {
  return min(max(length, 0), most);
}
#endif

}  // namespace hf_fastpath
