// Torch-free launch of add_rms_norm on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

// sum = residual + x; out = weight * sum / sqrt(mean(sum^2) + eps), over rows [rows, columns]. x, weight and
// out are of `dtype`, residual and sum float32; all contiguous. `programmatic_launch`: the weight may be read
// before the kernel in front is complete.
void launch_add_rms_norm(const void* x, const float* residual, const void* weight, void* out, float* sum,
                         int64_t rows, int64_t columns, float eps, bool programmatic_launch, DType dtype,
                         cudaStream_t stream);

}  // namespace hf_fastpath
