// What the gemv kernels share on the device: where a weight row lies, and the end of a sum.
#pragma once

#include "common/activation.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "gemv/gemv.h"

namespace hf_fastpath {

// Segment that holds output feature n.
__device__ __forceinline__ int segment_of(const GemvParams& p, int64_t n) {
  int segment = 0;
#pragma unroll
  for (int i = 1; i < kMaxGemvSegments; ++i) {
    if (i < p.num_segments && n >= p.segments[i].first) segment = i;
  }
  return segment;
}

// First element of the weight row of output feature n; `part` 1 is the up half of a gated pair.
template <class T, bool kGated>
__device__ __forceinline__ const T* weight_row(const GemvParams& p, int64_t n, int part) {
  if constexpr (kGated) {
    const GemvSegment& s = p.segments[part];
    return static_cast<const T*>(s.weight) + n * s.stride;
  } else {
    const GemvSegment& s = p.segments[segment_of(p, n)];
    return static_cast<const T*>(s.weight) + (n - s.first) * s.stride;
  }
}

// What is added to a dot product, loaded before the weights so that its latency hides behind theirs.
struct Addends {
  float bias = 0.f, residual = 0.f;
};

template <class T>
__device__ __forceinline__ Addends load_addends(const GemvParams& p, int m, int64_t n) {
  Addends a;
  const GemvSegment& s = p.segments[segment_of(p, n)];
  if (s.bias) a.bias = to_float(__ldg(static_cast<const T*>(s.bias) + (n - s.first)));
  if (p.residual) a.residual = to_float(__ldg(static_cast<const T*>(p.residual) + m * p.n + n));
  return a;
}

template <class T>
__device__ __forceinline__ void finish(const GemvParams& p, int m, int64_t n, float dot, const Addends& addends) {
  const float y = activate(dot + addends.bias, p.activation) + addends.residual;
  static_cast<T*>(p.out)[m * p.n + n] = from_float<T>(y);
}

template <class T>
__device__ __forceinline__ void finish_gated(const GemvParams& p, int m, int64_t n, float gate, float up) {
  static_cast<T*>(p.out)[m * p.n + n] = from_float<T>(activate(gate, p.activation) * up);
}

}  // namespace hf_fastpath
