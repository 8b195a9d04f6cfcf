// Arguments of gated_delta_step's kernels on every device: free of torch.
#pragma once

#include "common/heads.h"

namespace hf_fastpath {

constexpr int64_t kMaxDeltaKey = 256;  // elements of a key: a thread of the GPU keeps 8 rows

// What transformers adds to the square of a norm of q and k.
constexpr float kL2Eps = 1e-6f;

struct GatedDeltaParams {
  DType dtype;
  Heads q, k;         // [rows, k_heads, k_dim]; the `tokens` rows of a sequence follow each other
  Heads v;            // [rows, v_heads, v_dim]
  Heads a;            // [rows, v_heads], or [rows, v_heads, k_dim] if `per_element`
  Heads b;            // [rows, v_heads]
  Parameter a_log;    // [v_heads]
  Parameter dt_bias;  // a's shape without the rows, contiguous
  float* state;       // [batch, v_heads, k_dim, v_dim], contiguous, updated
  void* out;          // [rows, v_heads, v_dim], contiguous
  int64_t batch, tokens, k_heads, v_heads, k_dim, v_dim;
  bool per_element, l2_norm;
  float scale, beta_scale;
  bool programmatic_launch;  // parameters and state may be read before the kernel in front on the stream is
                             // complete
};

}  // namespace hf_fastpath
