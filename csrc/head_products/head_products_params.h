// Arguments of head_products' kernels on every device: free of torch.
#pragma once

#include "common/heads.h"

namespace hf_fastpath {

constexpr int64_t kMaxHeadInputs = 2048;

struct HeadProductsParams {
  DType dtype;
  Heads x;             // [batch, heads, inputs]
  const void* weight;  // [heads, outputs, inputs], or if `transposed` [heads, inputs, outputs]
  int64_t weight_head_stride, weight_row_stride;
  void* out;  // [batch, heads, outputs], contiguous
  int64_t batch, heads, inputs, outputs;
  bool transposed;
  bool programmatic_launch;  // may read the weight before the kernel in front on the stream is complete
};

}  // namespace hf_fastpath
