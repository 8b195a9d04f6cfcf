// A token's step of a selective state space on the CPU: kernel interface, free of torch.
#pragma once

#include "selective_state_step/selective_state_step_params.h"

namespace hf_fastpath {

// One channel of one row, all in float32.
struct SelectiveChannel {
  float* state;       // [state_size], updated
  const float* b;     // [state_size]
  const float* c;     // [state_size]
  const void* a_log;  // [state_size] of `a_log_dtype`, or null: `decay` is that of all elements
  DType a_log_dtype;
  float decay;  // else unused
  float step;   // t
  float added;  // t x
  int64_t state_size;
};

// Returns S . c behind the update.
float selective_channel_portable(const SelectiveChannel& channel);
float selective_channel_avx2(const SelectiveChannel& channel);

}  // namespace hf_fastpath
