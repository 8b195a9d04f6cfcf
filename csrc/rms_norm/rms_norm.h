// Torch-free launch of rms_norm on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

// out = weight * x / sqrt(mean(x^2) + eps) over rows of x: [rows, columns]. x and out contiguous, weight
// [columns].
void launch_rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t columns, float eps,
                     DType dtype, cudaStream_t stream);

}  // namespace hf_fastpath
