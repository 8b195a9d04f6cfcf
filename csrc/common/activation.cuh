// Activations in float32. Each is written as x * sigmoid-like, which does not cancel where 1 + tanh or 1 +
// erf would.
#pragma once

#include <cuda_runtime.h>

#include "common/dtype.h"

namespace hf_fastpath {

// x / (1 + exp(-z)). An exponential that overflows gives 0, and x = -inf gives NaN, as in PyTorch.
// Elementwise kernels take the hardware's approximations of exp and division, within a few ulp: nothing is
// rounded before. After a dot product (kExact) those ulp would add to its own rounding, and a value an output
// costs no time.
template <bool kExact>
__device__ __forceinline__ float times_sigmoid(float x, float z) {
  if constexpr (kExact) return x / (1.f + expf(-z));
  return __fdividef(x, 1.f + __expf(-z));
}

template <bool kExact>
__device__ __forceinline__ float silu(float x) {
  return times_sigmoid<kExact>(x, x);
}

// 0.5 x (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
template <bool kExact>
__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float kTwoSqrt2OverPi = 1.5957691216057308f, kCubic = 0.044715f;
  return times_sigmoid<kExact>(x, kTwoSqrt2OverPi * x * fmaf(kCubic * x, x, 1.f));
}

__device__ __forceinline__ float gelu_erf(float x) {
  constexpr float kSqrtHalf = 0.70710678118654752f;
  return 0.5f * x * (1.f + erff(x * kSqrtHalf));
}

__device__ __forceinline__ float relu(float x) { return x > 0.f || x != x ? x : 0.f; }  // NaN stays NaN

template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kRelu) return relu(x);
  if constexpr (kActivation == Activation::kSilu) return silu<false>(x);
  if constexpr (kActivation == Activation::kGeluTanh) return gelu_tanh<false>(x);
  if constexpr (kActivation == Activation::kGelu) return gelu_erf(x);
  return x;
}

// The same with the activation known at run time: for epilogues, where a branch a value costs nothing.
__device__ __forceinline__ float activate(float x, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return relu(x);
    case Activation::kSilu:
      return silu<true>(x);
    case Activation::kGeluTanh:
      return gelu_tanh<true>(x);
    case Activation::kGelu:
      return gelu_erf(x);
    default:
      return x;
  }
}

}  // namespace hf_fastpath
