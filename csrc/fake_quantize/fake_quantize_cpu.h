// Kernels of fake_quantize on the CPU: free of torch.
#pragma once

#include "fake_quantize/fake_quantize_params.h"

namespace hf_fastpath {

// Rows [begin, end) of the output. `row`: memory for a row in float32, of the calling thread.
using FakeQuantizeRows = void(const FakeQuantizeParams& params, int64_t begin, int64_t end, float* row);
FakeQuantizeRows fake_quantize_portable, fake_quantize_avx2;

// Marks columns [begin, end) in which a row has a magnitude of at least the limit.
using MarkOutliers = void(const FakeQuantizeParams& params, int64_t begin, int64_t end);
MarkOutliers mark_outliers_portable, mark_outliers_avx2;

}  // namespace hf_fastpath
