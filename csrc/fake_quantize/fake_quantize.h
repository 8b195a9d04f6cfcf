// Torch-free launch of fake_quantize on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "fake_quantize/fake_quantize_params.h"

namespace hf_fastpath {

void launch_fake_quantize(const FakeQuantizeParams& params, cudaStream_t stream);

// Launches the norm and the rounding as one kernel, if there is one for them: where blocks have a scale, and
// rows are aligned and not too long.
bool launch_normed_fake_quantize(const FakeQuantizeParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
