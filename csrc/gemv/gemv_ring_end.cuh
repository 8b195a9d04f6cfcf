// What becomes of the sums of gemv_ring_kernel: bias, activation and residual, the gated pair, or rotation
// and append to the KV cache.
#pragma once

#include "common/async.cuh"
#include "gemv/gemv_device.cuh"
#include "rope_append/rope_append.cuh"

namespace hf_fastpath {

// What becomes of sums.
enum class RingEnd {
  kPlain,   // bias, activation, residual
  kGated,   // activation(gate) * up
  kAppend,  // bias, rotation, cache
};

// How a unit's sums for row m of x end: prepare() before the wait for the kernel in front, load() behind it,
// store() at the end. What is loaded is first used in store(): no instruction waits for it before.
// kNeighbors: of an append, see find_pair().
template <class T, RingEnd kEnd, bool kNeighbors = true>
struct RingUnit;

template <class T, bool kNeighbors>
struct RingUnit<T, RingEnd::kPlain, kNeighbors> {
  using One = Chunk<T, 1>;
  T bias = from_float<T>(0.f), residual = from_float<T>(0.f);
  int64_t at;  // of residual and out

  __device__ __forceinline__ void prepare(const GemvParams& p, const RopeAppendParams&, int unit, int m) {
    const GemvSegment s = segment_of(p, unit);
    if (s.bias) bias = One::load_shared_line(static_cast<const T*>(s.bias) + (unit - s.first));
    at = int64_t(m) * p.n + unit;
  }
  __device__ __forceinline__ void load(const GemvParams& p, const RopeAppendParams&) {
    if (p.residual) residual = One::load_l2(static_cast<const T*>(p.residual) + at);
  }
  __device__ __forceinline__ void store(const GemvParams& p, const RopeAppendParams&,
                                        const float (&dots)[1]) const {
    float y = dots[0] + to_float(bias);
    if (p.activation != Activation::kNone) y = activate(y, p.activation);
    static_cast<T*>(p.out)[at] = from_float<T>(y + to_float(residual));
  }
};

template <class T, bool kNeighbors>
struct RingUnit<T, RingEnd::kGated, kNeighbors> {
  T* out;

  __device__ __forceinline__ void prepare(const GemvParams& p, const RopeAppendParams&, int unit, int m) {
    out = static_cast<T*>(p.out) + int64_t(m) * p.n + unit;
  }
  __device__ __forceinline__ void load(const GemvParams&, const RopeAppendParams&) {}
  __device__ __forceinline__ void store(const GemvParams& p, const RopeAppendParams&,
                                        const float (&dots)[2]) const {
    const float gate =
        p.activation == Activation::kSilu ? silu<true>(dots[0]) : activate(dots[0], p.activation);
    *out = from_float<T>(gate * dots[1]);
  }
};

template <class T, bool kNeighbors>
struct RingUnit<T, RingEnd::kAppend, kNeighbors> {
  using One = Chunk<T, 1>;
  Pair pair;
  T bias[2] = {from_float<T>(0.f), from_float<T>(0.f)}, cos[2], sin[2];
  char* cache;  // that a key or value goes to
  uint32_t capacity;
  int token, position;

  __device__ __forceinline__ void prepare(const GemvParams& p, const RopeAppendParams& rope, int unit,
                                          int m) {
    token = m;
    pair = find_pair<kNeighbors>(rope, unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int feature = pair.head * rope.head_dim + pair.element[half];
      const GemvSegment s = segment_of(p, feature);
      if (s.bias) bias[half] = One::load_shared_line(static_cast<const T*>(s.bias) + (feature - s.first));
    }
    // This is cache_place(), but only what this pair needs: fewer registers, and no choice that waits for
    // both addresses.
    const bool is_value = pair.head >= rope.num_heads + rope.num_kv_heads;
    if (rope.kv_table) {
      const int64_t* entry = rope.kv_table + 3 * rope.layer;
      cache = reinterpret_cast<char*>(entry[is_value]), capacity = static_cast<uint32_t>(entry[2]);
    } else {
      cache = static_cast<char*>(is_value ? rope.v_cache : rope.k_cache),
      capacity = static_cast<uint32_t>(rope.capacity);
    }
    const int row = m / rope.query_len;
    position = __ldcg(rope.seq_lens + row) - rope.query_len + (m - row * rope.query_len);
  }
  __device__ __forceinline__ void load(const GemvParams&, const RopeAppendParams& rope) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!pair.turns) continue;
      cos[half] = One::load_l2(token_angles<T>(rope, rope.cos, token) + pair.element[half]);
      sin[half] = One::load_l2(token_angles<T>(rope, rope.sin, token) + pair.element[half]);
    }
  }
  __device__ __forceinline__ void store(const GemvParams&, const RopeAppendParams& rope,
                                        const float (&dots)[2]) const {
    float values[2] = {dots[0] + to_float(bias[0]), dots[1] + to_float(bias[1])};
    if (pair.turns) {
      const float turn_cos[2] = {to_float(cos[0]), to_float(cos[1])};
      const float turn_sin[2] = {to_float(sin[0]), to_float(sin[1])};
      turn_pair(turn_cos, turn_sin, values[0], values[1]);
    }
    const CachePlace place{cache, cache, capacity};
    const int64_t slot = slot_of(position, capacity);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const FeaturePlace to = feature_place<T>(rope, place, slot, token, pair.head, pair.element[half]);
      store_from_float(to.element, 0, to.dtype, values[half]);
    }
  }
};

}  // namespace hf_fastpath
