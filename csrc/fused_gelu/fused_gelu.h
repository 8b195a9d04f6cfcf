// Torch-free launch of fused_gelu on a GPU.
// Experiments: docs/lab/fused_gelu.md
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

// out[i] = gelu(x[i]) for `count` contiguous elements; `activation` is kGeluTanh or kGelu.
void launch_fused_gelu(const void* x, void* out, int64_t count, DType dtype, Activation activation,
                       cudaStream_t stream);

}  // namespace hf_fastpath
