// RMS norm with a gate on the CPU: kernel interface, free of torch.
#pragma once

#include "gated_rms_norm/gated_rms_norm_params.h"

namespace hf_fastpath {

// Norms groups [begin, end) of all rows, in order. `products` holds a group's elements in float32.
void gated_rms_norm_portable(const GatedRmsNormParams& p, int64_t begin, int64_t end, float* products);
void gated_rms_norm_avx2(const GatedRmsNormParams& p, int64_t begin, int64_t end, float* products);

}  // namespace hf_fastpath
