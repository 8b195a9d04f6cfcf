// Arguments of latent_attention's kernels on every device: free of torch.
#pragma once

#include "common/heads.h"

namespace hf_fastpath {

constexpr int kMaxLatentRank = 512, kMaxLatentRope = 128;

struct LatentAttentionParams {
  DType dtype;             // of queries and caches
  Heads q_latent, q_rope;  // [batch, heads, rank] and [batch, heads, rope_dim]
  const void* latents;     // [batch, capacity, rank]
  const void* rope_keys;   // [batch, capacity, rope_dim]
  int64_t capacity;        // positions
  const int64_t*
      kv_table;  // addresses of latents and rope_keys and the capacity, which replace those; or null
  const int32_t* seq_lens;  // [batch]
  const int32_t* starts;    // [batch] or null
  void* out;                // [batch, heads, rank], contiguous
  int64_t batch, heads, rank, rope_dim;
  float scale;
};

}  // namespace hf_fastpath
