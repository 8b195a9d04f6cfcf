// Torch-free launch of gated_rms_norm on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "gated_rms_norm/gated_rms_norm_params.h"

namespace hf_fastpath {

void launch_gated_rms_norm(const GatedRmsNormParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
