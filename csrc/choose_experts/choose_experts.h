// Torch-free launch of a router's choice on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "choose_experts/choose_experts_params.h"

namespace hf_fastpath {

void launch_choose_experts(const ChooseExpertsParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
