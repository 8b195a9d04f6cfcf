// Root-mean-square norm on the CPU: kernel interface, free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

struct RmsNormArgs {
  DType dtype;    // of x, weight and out
  const void* x;  // [rows, hidden_size], rows `x_stride` elements apart
  int64_t x_stride;
  const void* weight;    // [hidden_size], or null for ones
  const void* residual;  // [rows, hidden_size], contiguous, or null
  const void* factor;    // [1], or null: multiplies what was rounded
  void* out;             // [rows, hidden_size], contiguous
  int64_t hidden_size;
  double eps;
  float weight_offset;  // what multiplies x is this + weight
};

// Norms rows [begin, end).
void rms_norm_portable(const RmsNormArgs& args, int64_t begin, int64_t end);
void rms_norm_avx2(const RmsNormArgs& args, int64_t begin, int64_t end);

}  // namespace hf_fastpath
