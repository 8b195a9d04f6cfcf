// Layer norm on the CPU: kernel interface, free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

struct LayerNormArgs {
  DType dtype;    // of x, weight, bias and out
  const void* x;  // [rows, hidden_size], rows `x_stride` elements apart
  int64_t x_stride;
  const void* weight;    // [hidden_size] or null for 1
  const void* bias;      // [hidden_size] or null for 0
  const void* residual;  // [rows, hidden_size], contiguous, or null
  void* out;             // [rows, hidden_size], contiguous
  int64_t hidden_size;
  double eps;
};

// Norms rows [begin, end).
void layer_norm_portable(const LayerNormArgs& args, int64_t begin, int64_t end);
void layer_norm_avx2(const LayerNormArgs& args, int64_t begin, int64_t end);

}  // namespace hf_fastpath
