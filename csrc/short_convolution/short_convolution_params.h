// Arguments of short_convolution's kernels on every device: free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

constexpr int64_t kMaxConvolutionWidth = 16;

struct ShortConvolutionParams {
  DType dtype;
  const void*
      x;  // [rows, channels], `x_stride` elements apart; the `tokens` rows of a sequence follow each other
  int64_t x_stride;
  void* state;             // [batch, channels, width], contiguous, moved by `tokens`
  const void* weight;      // [channels, width], contiguous
  const void* bias;        // [channels] or null
  const void* input_gate;  // like x, or null
  int64_t input_gate_stride;
  const void* output_gate;  // like x, or null
  int64_t output_gate_stride;
  void* out;  // [rows, channels], contiguous
  int64_t batch, tokens, channels, width;
  Activation activation;
};

}  // namespace hf_fastpath
