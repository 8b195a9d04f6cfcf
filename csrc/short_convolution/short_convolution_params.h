// Arguments of short_convolution's kernels on every device: free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

constexpr int64_t kMaxConvolutionWidth = 16;

struct ShortConvolutionParams {
  DType dtype;
  const void* x;  // [batch, channels], rows `x_stride` elements apart
  int64_t x_stride;
  void* state;             // [batch, channels, width], contiguous, moved by one
  const void* weight;      // [channels, width], contiguous
  const void* bias;        // [channels] or null
  const void* input_gate;  // like x, or null
  int64_t input_gate_stride;
  const void* output_gate;  // like x, or null
  int64_t output_gate_stride;
  void* out;  // [batch, channels], contiguous
  int64_t batch, channels, width;
  Activation activation;
};

}  // namespace hf_fastpath
