// Arguments of gated_rms_norm's kernels on every device: free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

// A choice in the op's schema, by number: hf_fastpath/choices.py has the names.
enum class GateActivation : int { kSilu = 0, kSigmoid = 1 };

struct GatedRmsNormParams {
  DType dtype;
  const void* x;  // [rows, hidden_size], rows `x_stride` elements apart
  int64_t x_stride;
  const void* gate;  // like x
  int64_t gate_stride;
  const void* weight;  // [hidden_size]
  void* out;           // [rows, hidden_size], contiguous
  int64_t rows, hidden_size, groups;
  float eps;
  bool gate_first;
  GateActivation activation;
  bool programmatic_launch;  // the weight may be read before the kernel in front on the stream is complete
};

}  // namespace hf_fastpath
