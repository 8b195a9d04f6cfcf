// Torch-free launch of the first product of LoRA adapters on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "lora_down/lora_down_params.h"

namespace hf_fastpath {

void launch_lora_down(const LoraDownParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
