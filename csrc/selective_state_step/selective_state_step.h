// Torch-free launch of a token's step of a selective state space on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "selective_state_step/selective_state_step_params.h"

namespace hf_fastpath {

void launch_selective_state_step(const SelectiveStateParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
