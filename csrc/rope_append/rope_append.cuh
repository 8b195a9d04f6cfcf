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

// What writing the pairs of the only token of a one-row batch takes: in shared memory.
struct RopeToken {
  float cos[kMaxRotaryDim], sin[kMaxRotaryDim];
  int64_t capacity, slot;
  char *k_cache, *v_cache;
};

// Where the token goes. For one thread; a barrier has to follow.
__device__ __forceinline__ void find_rope_slot(const RopeAppendParams& p, RopeToken& token) {
  token.capacity = p.capacity;
  token.k_cache = static_cast<char*>(p.k_cache);
  token.v_cache = static_cast<char*>(p.v_cache);
  if (p.kv_table) {
    const int64_t* entry = p.kv_table + 3 * p.layer;
    token.k_cache = reinterpret_cast<char*>(entry[0]);
    token.v_cache = reinterpret_cast<char*>(entry[1]);
    token.capacity = entry[2];
  }
  token.slot = (int64_t(p.seq_lens[0]) - 1) % token.capacity;
  if (token.slot < 0) token.slot += token.capacity;  // a wrong length must not write outside the cache
}

// Turns the pair (a, b) and writes it where it belongs.
template <class T>
__device__ __forceinline__ void store_pair(const RopeAppendParams& p, const RopeToken& token, int pair,
                                           float a, float b) {
  const int pairs = p.head_dim / 2, head = pair / pairs, i = pair - head * pairs;
  const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
  const int first = pair_feature(p, pair, 0) - head * p.head_dim;
  const int second = pair_feature(p, pair, 1) - head * p.head_dim;
  if (!is_value && i < p.rotary_dim / 2) {
    const float turned = a * token.cos[first] - b * token.sin[first];
    b = b * token.cos[second] + a * token.sin[second];
    a = turned;
  }
  if (is_query) {
    T* out = static_cast<T*>(p.q_out) + int64_t(head) * p.head_dim;
    out[first] = from_float<T>(a);
    out[second] = from_float<T>(b);
    return;
  }
  const int kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
  char* cache = is_value ? token.v_cache : token.k_cache;
  const int64_t at = (kv_head * token.capacity + token.slot) * p.head_dim;
  store_from_float(cache, at + first, p.cache_dtype, a);
  store_from_float(cache, at + second, p.cache_dtype, b);
}

}  // namespace hf_fastpath
