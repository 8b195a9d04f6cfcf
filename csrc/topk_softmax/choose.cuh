// A router's choice for one row, by one warp: topk_softmax, and the experts' kernels for themselves.
#pragma once

#include "common/warp.cuh"

namespace hf_fastpath {

constexpr int kFewLogits = 4;  // scores a lane: of up to 128 experts

// An expert and its weight.
struct Choice {
  int expert;
  float weight;
};

// The top_k largest of softmax(logit(0), ..., logit(count - 1)): lane k returns the k-th, equal values in the
// order of their indices, NaN in front. Lanes from top_k on return expert -1. kPerLane: scores a lane keeps.
template <int kPerLane, class Logit>
__device__ __forceinline__ Choice choose(const Logit& logit, int count, int top_k, bool normalized,
                                         int lane) {
  float value[kPerLane], top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * kWarpSize + lane;
    const float found = logit(min(index, count - 1));
    value[i] = index < count ? found : -INFINITY;
    top = fmaxf(top, value[i]);
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
  // Sums are float64: additions in float32 would cost more than the one rounding at the end.
  double sum[1] = {0.0};
  unsigned keys[kPerLane];  // order values that are not negative, NaN above all; 0: taken, or none
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const bool present = i * kWarpSize + lane < count;
    value[i] = present ? expf(value[i] - top) : 0.f;
    keys[i] = present ? (__float_as_uint(value[i]) & 0x7fffffffu) + 1 : 0;
    sum[0] += value[i];
  }
  Choice mine = {-1, 0.f};
#pragma unroll 1
  for (int k = 0; k < top_k; ++k) {
    unsigned best = 0, index = lane;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (keys[i] > best) best = keys[i], index = i * kWarpSize + lane;
    }
    const unsigned largest = __reduce_max_sync(kAllLanes, best);
    const unsigned lowest = __reduce_min_sync(kAllLanes, best == largest ? index : 0xffffffffu);
    if (lane == k) mine = {static_cast<int>(lowest), __uint_as_float(largest - 1)};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * kWarpSize + lane == lowest) keys[i] = 0;
    }
  }
  if (normalized) sum[0] = mine.weight;
  mine.weight = static_cast<float>(mine.weight / warp_sums<1>(sum, lane));
  return mine;
}

}  // namespace hf_fastpath
