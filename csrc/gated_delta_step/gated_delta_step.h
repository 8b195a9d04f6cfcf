// Torch-free launches of steps of a gated delta net on a GPU: of one token, and of several in turn.
#pragma once

#include <cuda_runtime.h>

#include "gated_delta_step/gated_delta_step_params.h"

namespace hf_fastpath {

void launch_gated_delta_step(const GatedDeltaParams& params, cudaStream_t stream);
void launch_gated_delta_walk(const GatedDeltaParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
