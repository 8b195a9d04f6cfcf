// Loads of recurrent steps' inputs on the device: all from L2, where the kernel in front has written them.
#pragma once

#include "common/heads.h"
#include "common/numeric.cuh"

namespace hf_fastpath {

template <class T>
__device__ __forceinline__ const T* head_of(const Heads& heads, int64_t row, int64_t head) {
  return static_cast<const T*>(heads.data) + row * heads.batch_stride + head * heads.head_stride;
}

template <class T>
__device__ __forceinline__ float load_float_l2(const T* p) {
  return to_float(Chunk<T, 1>::load_l2(p));
}

__device__ __forceinline__ float load_float_l2(const Parameter& parameter, int64_t i) {
  if (parameter.dtype == DType::kFloat32) return load_float_l2(static_cast<const float*>(parameter.data) + i);
  if (parameter.dtype == DType::kFloat16)
    return load_float_l2(static_cast<const __half*>(parameter.data) + i);
  return load_float_l2(static_cast<const __nv_bfloat16*>(parameter.data) + i);
}

// Brings element i of a parameter, if there is one, into L2.
__device__ __forceinline__ void prefetch_l2(const Parameter& parameter, int64_t i) {
  if (parameter.data == nullptr) return;
  const int size = parameter.dtype == DType::kFloat32 ? 4 : 2;
  prefetch_l2(static_cast<const char*>(parameter.data) + i * size);
}

__device__ __forceinline__ float softplus(float x) { return x > kSoftplusThreshold ? x : log1pf(expf(x)); }

}  // namespace hf_fastpath
