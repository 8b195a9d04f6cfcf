// Torch-free launch of q4_0_gemv on a GPU.
// Experiments: docs/lab/packed_gemv.md
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

// out[n] = sum over groups of scale * (quants - 8) . x, for one row of x with groups * 32 elements. `scales`
// is float16 [rows, groups], or null: then `quants` holds each group's scale in front of its 16 bytes.
void launch_q4_0_gemv(const void* x, const uint8_t* quants, const void* scales, void* out, int64_t rows,
                      int64_t groups, DType dtype, cudaStream_t stream);

}  // namespace hf_fastpath
