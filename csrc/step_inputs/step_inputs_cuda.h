// Torch-free launch of step_inputs on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "step_inputs/step_inputs.h"

namespace hf_fastpath {

void launch_step_inputs(const StepInputsParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
