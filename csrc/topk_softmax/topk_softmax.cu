// What: softmax of a row of router scores, its top_k largest values with their indices, and their sum made
//   one.
// Work split: a warp takes a row and keeps it in registers, interleaved over the lanes. It finds the largest
//   value top_k times; keys of value and index together make the choice of equal values that of the lower
//   index.
// Traffic: rows * num_experts * sizeof(T), and 12 bytes a choice: a few KB.
// Roofline: latency: of the load, two reductions and top_k more; 8 of 128 in 2.7 us (H200, 2026-11).

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "topk_softmax/topk_softmax.h"

namespace hf_fastpath {
namespace {

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  }
  return x;
}

// A number that orders values that are not negative, NaN above all, and among equal ones the lower index
// first. Never 0, which stands for a value that is taken.
__device__ __forceinline__ uint64_t order_of(float value, int index) {
  return uint64_t(__float_as_uint(value) & 0x7fffffffu) << 32 | (0xffffffffu - unsigned(index));
}

__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

// kPerLane: scores a lane keeps.
template <class T, int kPerLane>
__global__ void __launch_bounds__(kWarpSize) topk_softmax_kernel(TopkSoftmaxParams p) {
  allow_next_kernel();
  const int lane = threadIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + int64_t(blockIdx.x) * p.num_experts;
  wait_for_previous_kernel();
  float value[kPerLane], top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * kWarpSize + lane;
    value[i] = index < p.num_experts ? to_float(Chunk<T, 1>::load_l2(logits + index)) : -INFINITY;
    top = fmaxf(top, value[i]);
  }
  top = warp_max(top);
  // Sums are float64: additions in float32 would cost more than the one rounding at the end.
  double sum[1] = {0.0};
  uint64_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * kWarpSize + lane;
    value[i] = index < p.num_experts ? expf(value[i] - top) : 0.f;
    keys[i] = index < p.num_experts ? order_of(value[i], index) : 0;
    sum[0] += value[i];
  }
  uint64_t mine = 0;  // the lane-th choice
  for (int k = 0; k < p.top_k; ++k) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) best = keys[i] > best ? keys[i] : best;
    best = warp_max(best);
    if (lane == k) mine = best;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = keys[i] == best ? 0 : keys[i];
  }
  const float chosen = lane < p.top_k ? __uint_as_float(unsigned(mine >> 32)) : 0.f;
  if (p.normalized) sum[0] = chosen;
  float weight = static_cast<float>(chosen / warp_sums<1>(sum, lane));
  if (p.rounded) weight = to_float(from_float<T>(weight));
  if (lane >= p.top_k) return;
  const int64_t place = int64_t(blockIdx.x) * p.top_k + lane;
  p.weights[place] = weight;
  p.ids[place] = 0xffffffffu - unsigned(mine);
}

}  // namespace

void launch_topk_softmax(const TopkSoftmaxParams& p, cudaStream_t stream) {
  constexpr int kFew = 4;  // scores a lane for 128 experts
  const dim3 grid(p.rows), block(kWarpSize);
  const size_t smem_bytes = 0;
  with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = p.num_experts <= kFew * kWarpSize ? topk_softmax_kernel<T, kFew>
                                                          : topk_softmax_kernel<T, kMaxRoutedTo / kWarpSize>;
    HF_FASTPATH_CUDA_CHECK(
        launch_programmatic(kernel, grid, block, smem_bytes, stream, p.programmatic_launch, p));
  });
}

}  // namespace hf_fastpath
