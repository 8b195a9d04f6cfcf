// Arguments of latent_attention's kernels on every device: free of torch.
#pragma once

#include "common/heads.h"

namespace hf_fastpath {

constexpr int kMaxLatentRank = 512, kMaxLatentRope = 128;

// Which elements turn together, a choice in the op's schema: hf_fastpath/choices.py has the names.
enum class Rotation : int { kHalves = 0, kNeighbors = 1, kNeighborsToHalves = 2 };

#ifdef __CUDACC__
#define HF_FASTPATH_EVERYWHERE __host__ __device__
#else
#define HF_FASTPATH_EVERYWHERE
#endif

// Element e of what is rotated is x[own] * cos[e] + sign * x[other] * sin[e].
struct Turn {
  int own, other;
  float sign;

  HF_FASTPATH_EVERYWHERE Turn(Rotation rotation, int e, int size) {
    const int half = size / 2;
    if (rotation == Rotation::kNeighbors) {
      own = e, other = e ^ 1, sign = e % 2 == 0 ? -1.f : 1.f;
    } else {
      const bool first = e < half;
      const int pair = first ? e : e - half;
      const bool apart = rotation == Rotation::kHalves;
      const int low = apart ? pair : 2 * pair, high = apart ? pair + half : 2 * pair + 1;
      own = first ? low : high, other = first ? high : low, sign = first ? -1.f : 1.f;
    }
  }
};

struct LatentAttentionParams {
  DType dtype;             // of queries and caches
  Heads q_latent, q_rope;  // [batch, heads, rank] and [batch, heads, rope_dim]
  void* latents;           // [batch, capacity, rank]
  void* rope_keys;         // [batch, capacity, rope_dim]
  int64_t capacity;        // positions
  const int64_t*
      kv_table;  // addresses of latents and rope_keys and the capacity, which replace those; or null
  const int32_t* seq_lens;  // [batch]
  const int32_t* starts;    // [batch] or null
  void* out;                // [batch, heads, rank], contiguous
  int64_t batch, heads, rank, rope_dim;
  float scale;
  Heads new_latent,
      new_rope;    // [batch, rank] and [batch, rope_dim] of the newest position, or null: appended
  Heads cos, sin;  // [batch, rope_dim], which turn q_rope and new_rope; or null
  Rotation rotation;
  bool programmatic_launch;  // lengths, table and old positions may be read before the kernel in front on the
                             // stream is complete
};

}  // namespace hf_fastpath
