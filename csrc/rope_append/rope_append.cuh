// Where a pair of output features of the query, key and value projections goes: rotated and written to q_out
// or into the cache's slot. This file is for kernels that produce those features themselves.
#pragma once

#include "common/numeric.cuh"
#include "rope_append/rope_append.h"

namespace hf_fastpath {

// A head's elements form head_dim / 2 pairs: element i and i + rotary_dim / 2 of the rotated part, or
// neighbors there, and the two halves of the rest (of a value: of all).
struct Pair {
  int head;        // of queries, keys and values together
  int element[2];  // of the head; of cos and sin, too
  bool turns;
};

// kNeighbors: pairs may be neighbors.
template <bool kNeighbors = true>
__device__ __forceinline__ Pair find_pair(const RopeAppendParams& p, int pair) {
  const int pairs = p.head_dim / 2;
  // Heads mostly have a power of two of elements, and a division takes long.
  const int head = pairs & (pairs - 1) ? pair / pairs : pair >> (31 - __clz(pairs)), i = pair - head * pairs;
  const int rotary_dim = head >= p.num_heads + p.num_kv_heads ? 0 : p.rotary_dim;
  const int turned = rotary_dim / 2, rest = (p.head_dim - rotary_dim) / 2;
  const bool turns = i < turned;
  const bool neighbors = kNeighbors && p.neighbors;
  const int first = turns ? i << int(neighbors) : turned + i;
  const int apart = turns ? (neighbors ? 1 : turned) : rest;
  return {head, {first, first + apart}, turns};
}

// Feature of one half of a pair.
template <bool kNeighbors = true>
__device__ __forceinline__ int pair_feature(const RopeAppendParams& p, int pair, int half) {
  const Pair found = find_pair<kNeighbors>(p, pair);
  return found.head * p.head_dim + (half ? found.element[1] : found.element[0]);
}

// The head of a token that `head` counts among queries, keys and values, and how far the next of its kind is.
template <class T>
struct HeadInput {
  const T* x;
  int64_t stride;

  __device__ __forceinline__ HeadInput(const RopeAppendParams& p, int token, int head) {
    const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
    const int of_kind = head - (is_query ? 0 : p.num_heads + (is_value ? p.num_kv_heads : 0));
    const void* const first = is_query ? p.q.first : is_value ? p.v.first : p.k.first;
    stride = is_query ? p.q.head_stride : is_value ? p.v.head_stride : p.k.head_stride;
    const int64_t token_stride = is_query ? p.q.token_stride : is_value ? p.v.token_stride : p.k.token_stride;
    x = static_cast<const T*>(first) + token * token_stride + of_kind * stride;
  }
};

// Where the caches lie.
struct CachePlace {
  char *k_cache, *v_cache;
  int64_t capacity;
};

__device__ __forceinline__ CachePlace cache_place(const RopeAppendParams& p) {
  if (!p.kv_table) return {static_cast<char*>(p.k_cache), static_cast<char*>(p.v_cache), p.capacity};
  const int64_t* entry = p.kv_table + kTableColumns * p.layer;
  return {reinterpret_cast<char*>(entry[0]), reinterpret_cast<char*>(entry[1]), entry[2]};
}

// Slot of a cache row that a position goes to.
__device__ __forceinline__ int64_t slot_of(int64_t position, int64_t capacity) {
  int64_t slot = position;
  if (slot < 0 || slot >= capacity) slot %= capacity;  // rare, and a division takes long
  return slot < 0 ? slot + capacity : slot;            // a wrong length must not write outside the cache
}

// The same of a token of [batch, query_len].
__device__ __forceinline__ int64_t cache_slot(const RopeAppendParams& p, int64_t capacity, int token) {
  const int row = token / p.query_len, step = token - row * p.query_len;
  return slot_of(int64_t(p.seq_lens[row]) - p.query_len + step, capacity);
}

// Where element d of a token's head goes: in q_out or in a cache.
struct FeaturePlace {
  void* element;
  DType dtype;
};

template <class T>
__device__ __forceinline__ FeaturePlace feature_place(const RopeAppendParams& p, const CachePlace& place,
                                                      int64_t slot, int token, int head, int d) {
  if (head < p.num_heads) {
    const int64_t at = (int64_t(token) * p.num_heads + head) * p.head_dim + d;
    return {static_cast<T*>(p.q_out) + at, p.dtype};
  }
  const bool is_value = head >= p.num_heads + p.num_kv_heads;
  const int kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0), row = token / p.query_len;
  const int64_t at = ((int64_t(row) * p.num_kv_heads + kv_head) * place.capacity + slot) * p.head_dim + d;
  char* cache = is_value ? place.v_cache : place.k_cache;
  return {cache + at * (p.kv_type == KvType::kFloat32 ? 4 : 2), static_cast<DType>(p.kv_type)};
}

// Writes one feature of a token, which is not to be rotated, where it belongs.
template <class T>
__device__ __forceinline__ void store_feature(const RopeAppendParams& p, const CachePlace& place,
                                              int64_t slot, int token, int feature, float value) {
  const int head = feature / p.head_dim, d = feature - head * p.head_dim;
  const FeaturePlace to = feature_place<T>(p, place, slot, token, head, d);
  store_from_float(to.element, 0, to.dtype, value);
}

// Where appended tokens go: in shared memory.
struct AppendSlots {
  static constexpr int kMaxTokens = 16;
  CachePlace place;
  int64_t slots[kMaxTokens];
};

// The first `tokens` threads of the block find them; a barrier has to follow.
__device__ __forceinline__ void find_slots(const RopeAppendParams& p, int tokens, AppendSlots& to) {
  if (int(threadIdx.x) >= tokens) return;
  const CachePlace place = cache_place(p);
  if (threadIdx.x == 0) to.place = place;
  to.slots[threadIdx.x] = cache_slot(p, place.capacity, threadIdx.x);
}

// First element of a token's cos or sin.
template <class T>
__device__ __forceinline__ const T* token_angles(const RopeAppendParams& p, const void* angles, int token) {
  const int row = token / p.query_len, step = token - row * p.query_len;
  return static_cast<const T*>(angles) + row * p.cos_batch_stride + int64_t(step) * p.rotary_dim;
}

// Turns the pair (a, b) by cos[half] and sin[half] of its elements; rounded in the same way by every kernel.
__device__ __forceinline__ void turn_pair(const float (&cos)[2], const float (&sin)[2], float& a, float& b) {
  const float turned = fmaf(a, cos[0], -b * sin[0]);
  b = fmaf(b, cos[1], a * sin[1]);
  a = turned;
}

// The same if it turns, and writes it where it belongs.
template <class T>
__device__ __forceinline__ void store_pair(const RopeAppendParams& p, const CachePlace& place, int64_t slot,
                                           int token, const Pair& pair, const float (&cos)[2],
                                           const float (&sin)[2], float a, float b) {
  if (pair.turns) turn_pair(cos, sin, a, b);
  const float values[2] = {a, b};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const FeaturePlace to = feature_place<T>(p, place, slot, token, pair.head, pair.element[half]);
    store_from_float(to.element, 0, to.dtype, values[half]);
  }
}

}  // namespace hf_fastpath
