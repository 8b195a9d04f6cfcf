// The arguments of gather_ranks. This file is free of torch.
#pragma once

#include <cuda_runtime.h>

#include "common/peers.h"

namespace hf_fastpath {

struct GatherRanksParams {
  const void* x;  // [rows, width], contiguous
  void* out;      // [rows, size * width]: a part of all ranks, then the next part
  int64_t rows;
  int64_t width;                  // of x's rows in words of 16 bytes
  int64_t first_end, second_end;  // of three parts, in words
  PeerParams peers;
  bool programmatic_launch;
};

void launch_gather_ranks(const GatherRanksParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
