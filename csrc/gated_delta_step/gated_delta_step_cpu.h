// A token's step of a gated delta net on the CPU: kernel interface, free of torch.
#pragma once

#include "gated_delta_step/gated_delta_step_params.h"

namespace hf_fastpath {

// One head of one row, all in float32.
struct GatedDeltaHead {
  float* state;        // [k_dim, v_dim], updated
  const float* decay;  // [k_dim]
  const float* k;      // [k_dim], normed
  const float* q;      // [k_dim], normed and scaled
  float beta;
  float* v;     // [v_dim]; on return the result
  float* sums;  // [2, v_dim], overwritten
  int64_t k_dim, v_dim;
};

void gated_delta_head_portable(const GatedDeltaHead& head);
void gated_delta_head_avx2(const GatedDeltaHead& head);

}  // namespace hf_fastpath
