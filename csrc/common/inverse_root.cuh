// The factor of norms.
#pragma once

#include <cuda_runtime.h>

namespace hf_fastpath {

// 1 / sqrt(value). T: the type that the result is rounded to in the end. The instruction for it is off by two
// units in the last place of a float32, and a gated product shows such a factor twice.
template <class T>
__device__ __forceinline__ float inverse_root(float value) {
  return sizeof(T) == 4 ? 1.f / sqrtf(value) : rsqrtf(value);
}

}  // namespace hf_fastpath
