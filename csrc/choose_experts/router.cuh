// A router's choice for one row, by one warp: choose_experts, and the experts' kernels for themselves.
#pragma once

#include "common/warp.cuh"

namespace hf_fastpath {

constexpr int kFewLogits = 4;  // scores a lane: of up to 128 experts

// A score as a number that orders like it, NaN above all; not 0.
__device__ __forceinline__ unsigned order_of(float score) {
  if (isnan(score)) return 0xffffffffu;
  const unsigned bits = __float_as_uint(score + 0.f);  // -0 is 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The score again.
__device__ __forceinline__ float score_of(unsigned order) {
  return __uint_as_float(order >> 31 ? order ^ 0x80000000u : ~order);
}

// The largest of a warp's values, and the lowest index that has it, which is then 0: taken.
template <int kPerLane>
__device__ __forceinline__ unsigned take_largest(unsigned (&orders)[kPerLane], int lane, int* index_of) {
  unsigned best = 0, index = lane;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (orders[i] > best) best = orders[i], index = i * kWarpSize + lane;
  }
  const unsigned largest = __reduce_max_sync(kAllLanes, best);
  const int lowest = __reduce_min_sync(kAllLanes, best == largest ? index : 0xffffffffu);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i * kWarpSize + lane == lowest) orders[i] = 0;
  }
  *index_of = lowest;
  return largest;
}

// How a warp chooses the top_k largest of softmax(logit(0), ..., logit(count - 1)). kPerLane: scores a lane
// keeps.
template <int kPerLane>
class Router {
 public:
  // Lane k returns the k-th, equal scores in the order of their indices, NaN in front; lanes from top_k on
  // return -1.
  template <class Logit>
  __device__ __forceinline__ int choose(const Logit& logit, int count, int top_k, int lane) {
    unsigned orders[kPerLane];  // 0: taken, or none
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int index = i * kWarpSize + lane;
      const float found = logit(min(index, count - 1));
      scores_[i] = index < count ? found : -INFINITY;
      orders[i] = index < count ? order_of(found) : 0;
    }
    int mine = -1;
#pragma unroll 1
    for (int k = 0; k < top_k; ++k) {
      int index;
      const float score = score_of(take_largest(orders, lane, &index));
      if (k == 0) top_ = score;
      if (lane == k) mine = index, chosen_ = score;
    }
    is_some_ = mine >= 0;
    return mine;
  }

  // The weight of what choose() returned, 0 without. `normalized`: the weights' sum is 1.
  __device__ __forceinline__ float weight(bool normalized, int lane) const {
    const float share = is_some_ ? expf(chosen_ - top_) : 0.f;
    // Sums are float64: additions in float32 would cost more than the one rounding at the end.
    double sum[1] = {share};
    if (!normalized) {
      sum[0] = 0.0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum[0] += expf(scores_[i] - top_);
    }
    return static_cast<float>(share / warp_sums<1>(sum, lane));
  }

 private:
  float scores_[kPerLane], top_, chosen_;
  bool is_some_;
};

}  // namespace hf_fastpath
