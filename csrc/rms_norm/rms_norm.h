// Torch-free launch of rms_norm on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

// out = (weight_offset + weight) * x / sqrt(mean(x^2) + eps) over rows of x: [rows, columns], plus residual,
// which is like x or null, times factor, which is [1] or null. x, residual and out contiguous, weight
// [columns] or null, as if the factor were 1. `programmatic_launch`: weight and factor may be read before
// the kernel in front is complete.
void launch_rms_norm(const void* x, const void* weight, const void* residual, const void* factor, void* out,
                     int64_t rows, int64_t columns, float eps, float weight_offset, bool programmatic_launch,
                     DType dtype, cudaStream_t stream);

}  // namespace hf_fastpath
