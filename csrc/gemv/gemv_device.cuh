// What the gemv kernels share: alignment, where a weight row lies, and the end of a sum.
#pragma once

#include "common/activation.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "gemv/gemv.h"

namespace hf_fastpath {

// Whether x and the rows of [n, k] or [k, n] weights are whole 16-byte chunks, aligned.
inline bool has_aligned_rows(const GemvParams& p) {
  const int elems = static_cast<int>(16 / element_size(p.dtype));
  bool aligned = is_aligned16(p.x) && p.k % elems == 0 && (!p.transposed || p.n % elems == 0);
  for (int i = 0; i < p.num_segments; ++i) {
    aligned = aligned && is_aligned16(p.segments[i].weight) && p.segments[i].stride % elems == 0;
  }
  return aligned;
}

// The segment that holds output feature n. One segment is the usual case: its fields are then plain kernel
// parameters, where an index known at run time would cost a chain of loads before the first weight is asked
// for.
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
           int64_t(n) * (part == 0 ? p.segments[0].stride : p.segments[1].stride);
  } else {
    const GemvSegment s = segment_of(p, n);
    return static_cast<const T*>(s.weight) + int64_t(n - s.first) * s.stride;
  }
}

// What is added to a dot product, loaded before the weights are used so that its latency hides behind theirs;
// kept as loaded, since a conversion would wait for it.
template <class T>
struct Addends {
  T bias = from_float<T>(0.f), residual = from_float<T>(0.f);
};

template <class T>
__device__ __forceinline__ Addends<T> load_addends(const GemvParams& p, int m, int n) {
  using C = Chunk<T, 1>;
  Addends<T> a;
  const GemvSegment s = segment_of(p, n);
  if (s.bias) a.bias = C::load_shared_line(static_cast<const T*>(s.bias) + (n - s.first));
  if (p.residual) a.residual = C::load_l2(static_cast<const T*>(p.residual) + int64_t(m) * p.n + n);
  return a;
}

// Brings them into L2: for kernels that have none to spare until the sums are done.
template <class T>
__device__ __forceinline__ void prefetch_addends(const GemvParams& p, int m, int n) {
  const GemvSegment s = segment_of(p, n);
  if (s.bias) prefetch_l2(static_cast<const T*>(s.bias) + (n - s.first));
  if (p.residual) prefetch_l2(static_cast<const T*>(p.residual) + int64_t(m) * p.n + n);
}

template <class T>
__device__ __forceinline__ void finish(const GemvParams& p, int m, int n, float dot,
                                       const Addends<T>& addends) {
  const float y = activate(dot + to_float(addends.bias), p.activation) + to_float(addends.residual);
  static_cast<T*>(p.out)[int64_t(m) * p.n + n] = from_float<T>(y);
}

template <class T>
__device__ __forceinline__ void finish_gated(const GemvParams& p, int m, int n, float gate, float up) {
  static_cast<T*>(p.out)[int64_t(m) * p.n + n] = from_float<T>(activate(gate, p.activation) * up);
}

}  // namespace hf_fastpath
