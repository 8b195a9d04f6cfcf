// Torch-free launch of greedy_token on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "greedy_token/greedy_token.h"

namespace hf_fastpath {

void launch_greedy_token(const GreedyTokenParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
