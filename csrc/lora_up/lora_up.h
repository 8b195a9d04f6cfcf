// Torch-free launch of the second product of LoRA adapters on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "lora_up/lora_up_params.h"

namespace hf_fastpath {

void launch_lora_up(const LoraUpParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
