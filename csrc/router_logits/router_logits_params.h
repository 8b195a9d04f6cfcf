// Arguments of router_logits' kernels on every device: free of torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

struct RouterLogitsParams {
  DType dtype;         // of x
  DType weight_dtype;  // the same, or float32
  const void* x;       // [rows, inputs], contiguous
  const void* weight;  // [outputs, inputs], rows weight_row_stride elements apart
  int64_t weight_row_stride;
  float* out;  // [rows, outputs], contiguous
  int64_t rows, inputs, outputs;
  bool programmatic_launch;  // may read the weight before the kernel in front on the stream is complete
};

}  // namespace hf_fastpath
