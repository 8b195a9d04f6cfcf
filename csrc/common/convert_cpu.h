// Conversion of activations to float32, done once a call for all threads. This file is free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

// out[i] = float(x[i]) for `count` elements of `dtype`.
void convert_to_float_portable(DType dtype, const void* x, float* out, int64_t count);
void convert_to_float_avx2(DType dtype, const void* x, float* out, int64_t count);

}  // namespace hf_fastpath
