// Torch-free launch of exponential_race on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "exponential_race/exponential_race.h"

namespace hf_fastpath {

void launch_exponential_race(const ExponentialRaceParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
