// A sum in float32 and its root-mean-square norm on the CPU: kernel interface, free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

struct AddRmsNormArgs {
  DType dtype;            // of x, weight and out
  const void* x;          // [rows, hidden_size], contiguous, as all below
  const float* residual;  // [rows, hidden_size]
  const void* weight;     // [hidden_size]
  void* out;              // [rows, hidden_size]
  float* sum;             // [rows, hidden_size]
  int64_t hidden_size;
  double eps;
};

// Adds and norms rows [begin, end).
void add_rms_norm_portable(const AddRmsNormArgs& args, int64_t begin, int64_t end);
void add_rms_norm_avx2(const AddRmsNormArgs& args, int64_t begin, int64_t end);

}  // namespace hf_fastpath
