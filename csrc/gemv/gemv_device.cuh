// What the gemv kernels share on the device: where a weight row lies, and the end of a sum.
#pragma once

#include "common/activation.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "gemv/gemv.h"

namespace hf_fastpath {

// The segment that holds output feature n. One segment is the usual case: its fields are then plain kernel
// parameters, where an index known at run time would cost a chain of loads before the first weight is asked for.
__device__ __forceinline__ GemvSegment segment_of(const GemvParams& p, int n) {
  GemvSegment s = p.segments[0];
  if (p.num_segments > 1) {
#pragma unroll
    for (int i = 1; i < kMaxGemvSegments; ++i) {
      if (i < p.num_segments && n >= p.segments[i].first) s = p.segments[i];
    }
  }
  return s;
}

// First element of the weight row of output feature n; `part` 1 is the up half of a gated pair.
template <class T, bool kGated>
__device__ __forceinline__ const T* weight_row(const GemvParams& p, int n, int part) {
  if constexpr (kGated) {
    return static_cast<const T*>(part == 0 ? p.segments[0].weight : p.segments[1].weight) +
           n * (part == 0 ? p.segments[0].stride : p.segments[1].stride);
  } else {
    const GemvSegment s = segment_of(p, n);
    return static_cast<const T*>(s.weight) + (n - s.first) * s.stride;
  }
}

// What is added to a dot product, loaded before the weights so that its latency hides behind theirs.
struct Addends {
  float bias = 0.f, residual = 0.f;
};

template <class T>
__device__ __forceinline__ Addends load_addends(const GemvParams& p, int m, int n) {
  Addends a;
  const GemvSegment s = segment_of(p, n);
  if (s.bias) a.bias = to_float(__ldg(static_cast<const T*>(s.bias) + (n - s.first)));
  if (p.residual) a.residual = to_float(__ldg(static_cast<const T*>(p.residual) + int64_t(m) * p.n + n));
  return a;
}

template <class T>
__device__ __forceinline__ void finish(const GemvParams& p, int m, int n, float dot, const Addends& addends) {
  const float y = activate(dot + addends.bias, p.activation) + addends.residual;
  static_cast<T*>(p.out)[int64_t(m) * p.n + n] = from_float<T>(y);
}

template <class T>
__device__ __forceinline__ void finish_gated(const GemvParams& p, int m, int n, float gate, float up) {
  static_cast<T*>(p.out)[int64_t(m) * p.n + n] = from_float<T>(activate(gate, p.activation) * up);
}

}  // namespace hf_fastpath
