// Exponentials of a softmax whose scores come in pieces.
#pragma once

#include <cuda_runtime.h>

namespace hf_fastpath {

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float exp2_approx(float x) {  // 2 ulp; -inf gives 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^(x - max) where max may be -inf (nothing seen yet): then 0, unless x is NaN.
__device__ __forceinline__ float exp2_below(float x, float max) {
  return exp2_approx(x - (max == -INFINITY ? 0.f : max));
}

}  // namespace hf_fastpath
