// The arguments of gather_ranks. Free of torch.
#pragma once

#include <cuda_runtime.h>

#include "common/peers.h"

namespace hf_fastpath {

struct GatherRanksParams {
  const void* x;  // [rows, width], contiguous
  void* out;      // [rows, size, width]
  int64_t rows;
  int64_t width;  // of x's rows in words of 16 bytes
  PeerParams peers;
  bool programmatic_launch;
};

void launch_gather_ranks(const GatherRanksParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
