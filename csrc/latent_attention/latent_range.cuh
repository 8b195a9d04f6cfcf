// Which positions a block of latent_attention takes.
#pragma once

#include "common/async.cuh"
#include "common/heads.cuh"
#include "common/lengths.h"
#include "common/softmax.cuh"
#include "latent_attention/latent_attention.h"

namespace hf_fastpath {

// Positions that are worth a block: a tile of the tensor cores' kernel.
constexpr int kMinLatentChunk = 32;

// A cache and the positions of one sequence that are visible, cut into `active` pieces of `chunk`.
struct LatentRange {
  void* latents;
  void* rope_keys;
  int capacity, first, last, chunk, active;

  __device__ __forceinline__ LatentRange(const LatentSplits& s, int row) {
    const LatentAttentionParams& p = s.p;
    latents = p.latents, rope_keys = p.rope_keys, capacity = static_cast<int>(p.capacity);
    if (p.kv_table) {
      latents = reinterpret_cast<void*>(__ldcg(reinterpret_cast<const long long*>(p.kv_table)));
      rope_keys = reinterpret_cast<void*>(__ldcg(reinterpret_cast<const long long*>(p.kv_table) + 1));
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

// Element e of a rotary part, rotated if there are angles.
template <class T>
__device__ __forceinline__ float rotated_at(const LatentAttentionParams& p, int row, const T* x, int e) {
  if (!p.cos.data) return load_float_l2(x + e);
  const Turn turn(p.rotation, e, static_cast<int>(p.rope_dim));
  const float cos = load_float_l2(head_of<T>(p.cos, row, 0) + e);
  const float sin = load_float_l2(head_of<T>(p.sin, row, 0) + e);
  return fmaf(turn.sign * load_float_l2(x + turn.other), sin, load_float_l2(x + turn.own) * cos);
}

// Element e of the newest position's latent (below `rank`) or key, as the cache holds it.
template <class T>
__device__ __forceinline__ T newest(const LatentAttentionParams& p, int row, int e) {
  const int rank = static_cast<int>(p.rank);
  if (e < rank) return Chunk<T, 1>::load_l2(head_of<T>(p.new_latent, row, 0) + e);
  return from_float<T>(rotated_at(p, row, head_of<T>(p.new_rope, row, 0), e - rank));
}

// Appends the newest position, which one block of a row does; the others take it from where it comes from.
template <class T>
__device__ __forceinline__ void append_newest(const LatentAttentionParams& p, const LatentRange& range,
                                              int row) {
  if (!p.new_latent.data || range.last <= 0) return;
  const int rank = static_cast<int>(p.rank), rope_dim = static_cast<int>(p.rope_dim);
  const int64_t slot = int64_t(row) * range.capacity + range.last - 1;
  for (int e = threadIdx.x; e < rank + rope_dim; e += blockDim.x) {
    T* to = e < rank ? static_cast<T*>(range.latents) + slot * rank + e
                     : static_cast<T*>(range.rope_keys) + slot * rope_dim + e - rank;
    *to = newest<T>(p, row, e);
  }
}

}  // namespace hf_fastpath
