// The second product of LoRA adapters on the CPU: kernel interface, free of torch.
#pragma once

#include "lora_up/lora_up_params.h"

namespace hf_fastpath {

// Features [begin, end) of out, of every row. A sum does not depend on the range.
void lora_up_portable(const LoraUpParams& p, int64_t begin, int64_t end);
void lora_up_avx2(const LoraUpParams& p, int64_t begin, int64_t end);

}  // namespace hf_fastpath
