// Torch-free launch of read_stream on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

// Names in Python: hf_fastpath.ops.read_stream.VARIANTS, same order.
enum class ReadVariant : int { kTile = 0, kPersistent = 1, kBulk = 2 };

// *out = max |data[i]| over `count` contiguous elements, as float32; NaN if any is NaN.
void launch_read_stream(const void* data, int64_t count, DType dtype, ReadVariant variant, float* out,
                        cudaStream_t stream);

}  // namespace hf_fastpath
