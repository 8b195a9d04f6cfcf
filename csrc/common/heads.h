// Views of the inputs of recurrent steps: free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

// [batch, heads, elements]: strides in elements, and the elements of a head follow each other. Null without
// data.
struct Heads {
  const void* data;
  int64_t batch_stride, head_stride;
};

// A weight that may have another type than the activations; null without data.
struct Parameter {
  const void* data;
  DType dtype;
};

// torch.nn.functional.softplus is the identity above it.
constexpr float kSoftplusThreshold = 20.0f;

}  // namespace hf_fastpath
