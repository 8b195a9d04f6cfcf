// Torch-free launches of steps of a selective state space on a GPU: of one token, and of several in turn.
#pragma once

#include <cuda_runtime.h>

#include "selective_state_step/selective_state_step_params.h"

namespace hf_fastpath {

void launch_selective_state_step(const SelectiveStateParams& params, cudaStream_t stream);

constexpr int64_t kMaxWalkedState = 256;  // places of a state that four lanes keep in registers
void launch_selective_state_walk(const SelectiveStateParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
