// Where a pair of output features of the query, key and value projections goes: rotated and written to q_out
// or into the cache's slot. For kernels that produce those features themselves.
#pragma once

#include "common/numeric.cuh"
#include "rope_append/rope_append.h"

namespace hf_fastpath {

constexpr int kMaxRotaryDim = 256;  // as the largest head

// A head's elements form head_dim / 2 pairs: element i and i + rotary_dim / 2 of the rotated part, the two
// halves of the rest (of a value: of all).
__device__ __forceinline__ int pair_feature(const RopeAppendParams& p, int pair, int half) {
  const int pairs = p.head_dim / 2, head = pair / pairs, i = pair - head * pairs;
  const int rotary_dim = head >= p.num_heads + p.num_kv_heads ? 0 : p.rotary_dim;
  const int turned = rotary_dim / 2, rest = (p.head_dim - rotary_dim) / 2;
  const int element = i < turned ? i + half * turned : turned + i + half * rest;
  return head * p.head_dim + element;
}

// Where the caches lie.
struct CachePlace {
  char *k_cache, *v_cache;
  int64_t capacity;
};

__device__ __forceinline__ CachePlace cache_place(const RopeAppendParams& p) {
  if (!p.kv_table) return {static_cast<char*>(p.k_cache), static_cast<char*>(p.v_cache), p.capacity};
  const int64_t* entry = p.kv_table + 3 * p.layer;
  return {reinterpret_cast<char*>(entry[0]), reinterpret_cast<char*>(entry[1]), entry[2]};
}

// Slot of the cache row that a token of [batch, query_len] goes to.
__device__ __forceinline__ int64_t cache_slot(const RopeAppendParams& p, int64_t capacity, int token) {
  const int row = token / p.query_len, step = token - row * p.query_len;
  const int64_t slot = (int64_t(p.seq_lens[row]) - p.query_len + step) % capacity;
  return slot < 0 ? slot + capacity : slot;  // a wrong length must not write outside the cache
}

// Writes one feature of a token, which is not to be rotated, where it belongs.
template <class T>
__device__ __forceinline__ void store_feature(const RopeAppendParams& p, const CachePlace& place,
                                              int64_t slot, int token, int feature, float value) {
  const int head = feature / p.head_dim, d = feature - head * p.head_dim;
  if (head < p.num_heads) {
    const int64_t at = (int64_t(token) * p.num_heads + head) * p.head_dim + d;
    static_cast<T*>(p.q_out)[at] = from_float<T>(value);
    return;
  }
  const bool is_value = head >= p.num_heads + p.num_kv_heads;
  const int kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0), row = token / p.query_len;
  const int64_t at = ((int64_t(row) * p.num_kv_heads + kv_head) * place.capacity + slot) * p.head_dim + d;
  store_from_float(is_value ? place.v_cache : place.k_cache, at, p.cache_dtype, value);
}

// Where appended tokens go: in shared memory.
struct AppendSlots {
  static constexpr int kMaxTokens = 16;
  CachePlace place;
  int64_t slots[kMaxTokens];
};

// By the first `tokens` threads of the block; a barrier has to follow.
__device__ __forceinline__ void find_slots(const RopeAppendParams& p, int tokens, AppendSlots& to) {
  if (int(threadIdx.x) >= tokens) return;
  const CachePlace place = cache_place(p);
  if (threadIdx.x == 0) to.place = place;
  to.slots[threadIdx.x] = cache_slot(p, place.capacity, threadIdx.x);
}

// A pair of features and how it turns.
struct Pair {
  int feature[2];
  int angle[2];  // elements of cos and sin
  bool turns;
};

__device__ __forceinline__ Pair find_pair(const RopeAppendParams& p, int pair) {
  const int pairs = p.head_dim / 2, head = pair / pairs, i = pair - head * pairs;
  Pair found;
  found.turns = head < p.num_heads + p.num_kv_heads && i < p.rotary_dim / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    found.feature[half] = pair_feature(p, pair, half);
    found.angle[half] = found.feature[half] - head * p.head_dim;
  }
  return found;
}

// First element of a token's cos or sin.
template <class T>
__device__ __forceinline__ const T* token_angles(const RopeAppendParams& p, const void* angles, int token) {
  const int row = token / p.query_len, step = token - row * p.query_len;
  return static_cast<const T*>(angles) + row * p.cos_batch_stride + int64_t(step) * p.rotary_dim;
}

// Turns the pair (a, b) by cos[half] and sin[half] of its elements, if it turns, and writes it where it
// belongs.
template <class T>
__device__ __forceinline__ void store_pair(const RopeAppendParams& p, const CachePlace& place, int64_t slot,
                                           int token, const Pair& pair, const float (&cos)[2],
                                           const float (&sin)[2], float a, float b) {
  if (pair.turns) {
    const float turned = a * cos[0] - b * sin[0];
    b = b * cos[1] + a * sin[1];
    a = turned;
  }
  store_feature<T>(p, place, slot, token, pair.feature[0], a);
  store_feature<T>(p, place, slot, token, pair.feature[1], b);
}

}  // namespace hf_fastpath
