// The arguments of sum_ranks. This file is free of torch.
#pragma once

#include <cuda_runtime.h>

#include "common/dtype.h"
#include "common/peers.h"

namespace hf_fastpath {

struct SumRanksParams {
  const void* x;         // [elements], contiguous
  const void* residual;  // the same, or null
  void* out;
  int64_t elements;  // a multiple of 8
  PeerParams peers;
  DType dtype;
  bool programmatic_launch;
};

void launch_sum_ranks(const SumRanksParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
