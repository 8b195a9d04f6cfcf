// Head dims of the attention ops.
#pragma once

#include <cstdint>

namespace hf_fastpath {

constexpr int kMaxHeadDim = 512;  // even ones up to here

// Those that tensor cores and wide loads are made for, in steps of 8; the portable kernels take the others.
constexpr int kMinTunedHeadDim = 32, kMaxTunedHeadDim = 256;

constexpr bool takes_head_dim(int64_t dim) { return dim > 0 && dim <= kMaxHeadDim && dim % 2 == 0; }

constexpr bool is_tuned_head_dim(int64_t dim) {
  return dim >= kMinTunedHeadDim && dim <= kMaxTunedHeadDim && dim % 8 == 0;
}

}  // namespace hf_fastpath
