// Sums and maxima over the lanes of a warp and the warps of a block, in a fixed order: results are
// reproducible.
#pragma once

#include <cuda_runtime.h>

namespace hf_fastpath {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

// Sums kCount values (a power of two, at most 32) over the warp at once: each step halves the values a lane
// keeps, so that kCount - 1 + log2(32 / kCount) shuffles do the work of 5 * kCount. Returns the sum of value
// `lane >> (5 - log2(kCount))`; destroys `values`.
template <int kCount, typename Sum>
__device__ __forceinline__ Sum warp_sums(Sum (&values)[kCount], int lane) {
  static_assert(kCount >= 1 && kCount <= kWarpSize && (kCount & (kCount - 1)) == 0,
                "kCount is a power of two");
  int offset = kWarpSize / 2;
#pragma unroll
  for (int count = kCount; count > 1; count /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const Sum keep = upper ? values[i + count / 2] : values[i];
      const Sum send = upper ? values[i] : values[i + count / 2];
      values[i] = keep + __shfl_xor_sync(kAllLanes, send, offset);
    }
  }
  Sum sum = values[0];
#pragma unroll
  for (int step = kWarpSize / kCount / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}

// Sum over the block, in every thread. `scratch` holds one float a warp and may be used again right after.
template <int kMaxWarps = 32>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  x = warp_sum(x);
  if (warps == 1) return x;
  if (lane == 0) scratch[warp] = x;
  __syncthreads();  // every warp's sum is written
  x = warp_sum(lane < warps ? scratch[lane] : 0.f);
  __syncthreads();  // every warp has read them: scratch is free again
  return x;
}

}  // namespace hf_fastpath
