// Torch-free launch of a token's step of a short convolution on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "short_convolution/short_convolution_params.h"

namespace hf_fastpath {

void launch_short_convolution(const ShortConvolutionParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
