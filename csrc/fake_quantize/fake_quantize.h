// Torch-free launch of fake_quantize on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "fake_quantize/fake_quantize_params.h"

namespace hf_fastpath {

void launch_fake_quantize(const FakeQuantizeParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
