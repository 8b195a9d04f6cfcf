// Torch-free launch of layer_norm on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

// out = (x - mean) / sqrt(var + eps) * weight + bias over rows of x: [rows, columns], plus residual, which is
// like x or null. x, residual and out contiguous; weight and bias [columns] or null for 1 and 0.
void launch_layer_norm(const void* x, const void* weight, const void* bias, const void* residual, void* out,
                       int64_t rows, int64_t columns, float eps, DType dtype, cudaStream_t stream);

}  // namespace hf_fastpath
