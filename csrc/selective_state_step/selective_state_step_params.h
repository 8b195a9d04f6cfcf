// Arguments of selective_state_step's kernels on every device: free of torch.
#pragma once

#include "common/heads.h"

namespace hf_fastpath {

// Parameters have one element a head, or if `per_channel` one a channel of a head.
struct SelectiveStateParams {
  DType dtype;
  Heads x;            // [rows, heads, head_dim]; the `tokens` rows of a sequence follow each other
  Heads dt;           // [rows, heads], or [rows, heads, head_dim] if `per_channel`
  Parameter a_log;    // [heads], or [heads, head_dim, state_size] if `per_channel`, contiguous
  Heads b, c;         // [rows, groups, state_size]
  float* state;       // [batch, heads, head_dim, state_size], contiguous, updated
  Parameter d;        // or null
  Parameter dt_bias;  // or null
  Heads z;            // like x, or null
  void* out;          // [rows, heads, head_dim], contiguous
  int64_t batch, tokens, heads, head_dim, groups, state_size;
  bool per_channel;
};

}  // namespace hf_fastpath
