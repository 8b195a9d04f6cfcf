// Which positions a block of latent_attention takes.
#pragma once

#include "common/async.cuh"
#include "common/lengths.h"
#include "common/softmax.cuh"
#include "latent_attention/latent_attention.h"

namespace hf_fastpath {

// Positions that are worth a block: two tiles of the tensor cores' kernel.
constexpr int kMinLatentChunk = 64;

// A cache and the positions of one sequence that are visible, cut into `active` pieces of `chunk`.
struct LatentRange {
  const void* latents;
  const void* rope_keys;
  int capacity, first, last, chunk, active;

  __device__ __forceinline__ LatentRange(const LatentSplits& s, int row) {
    const LatentAttentionParams& p = s.p;
    latents = p.latents, rope_keys = p.rope_keys, capacity = static_cast<int>(p.capacity);
    if (p.kv_table) {
      latents = reinterpret_cast<const void*>(__ldcg(reinterpret_cast<const long long*>(p.kv_table)));
      rope_keys = reinterpret_cast<const void*>(__ldcg(reinterpret_cast<const long long*>(p.kv_table) + 1));
      capacity = static_cast<int>(__ldcg(reinterpret_cast<const long long*>(p.kv_table) + 2));
    }
    first = p.starts ? max(__ldcg(p.starts + row), 0) : 0;
    last = bounded_length(__ldcg(p.seq_lens + row), capacity);
    const int count = max(last - first, 0);
    chunk = (count + s.splits - 1) / s.splits;
    chunk = max((chunk + kMinLatentChunk - 1) / kMinLatentChunk, 1) * kMinLatentChunk;
    active = (count + chunk - 1) / chunk;
  }

  __device__ __forceinline__ int begin(int split) const { return first + split * chunk; }
  __device__ __forceinline__ int end(int split) const { return min(begin(split) + chunk, last); }
};

}  // namespace hf_fastpath
