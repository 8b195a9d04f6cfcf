// Torch-free launch of a router's product on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "router_logits/router_logits_params.h"

namespace hf_fastpath {

void launch_router_logits(const RouterLogitsParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
