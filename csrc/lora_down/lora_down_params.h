// Arguments of lora_down's kernels on every device: free of torch.
#pragma once

#include "common/lora.h"

namespace hf_fastpath {

struct LoraDownParams {
  DType dtype;                  // of x and the norm's parameters
  const void* x;                // [rows, inputs], contiguous
  LoraMatrices matrices;        // [rank, inputs] each
  float* out;                   // [rows, ranks], contiguous
  int rows, inputs;             // rows: 1 to kMaxLoraRows
  const int* chosen;            // [rows], the owner whose matrices a row takes; null: all matrices
  int owner[kMaxLoraMatrices];  // of each matrix; out is 0 where a row takes another one's
  NormKind norm;                // of x; where a kernel applies it
  const void* norm_weight;      // [inputs] or null for 1
  const void* norm_bias;        // [inputs] or null, for NormKind::kLayer
  float norm_eps;
  bool programmatic_launch;  // may read all but x before the kernel in front on the stream is complete
};

}  // namespace hf_fastpath
