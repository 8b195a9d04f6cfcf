// A router's choice for one row, by one warp: choose_experts, and the experts' kernels for themselves. The
// warp keeps the row in registers, interleaved over the lanes. It finds the largest value top_k times, each
// time by a maximum of values and a minimum of indices; groups' sums in the same way. Without bias and groups
// it chooses by logits, and needs no scores but those of the chosen.
#pragma once

#include "choose_experts/choose_experts_params.h"
#include "common/numeric.cuh"
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

// The largest of a warp's values that are wanted, and the lowest index that has it; 0 if there is none.
template <int kPerLane, class Wanted>
__device__ __forceinline__ unsigned find_largest(const unsigned (&orders)[kPerLane], int lane,
                                                 const Wanted& is_wanted, int* index_of) {
  unsigned best = 0, index = lane;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int own = i * kWarpSize + lane;
    if (orders[i] > best && is_wanted(own)) best = orders[i], index = own;
  }
  const unsigned largest = __reduce_max_sync(kAllLanes, best);
  *index_of = __reduce_min_sync(kAllLanes, best == largest ? index : 0xffffffffu);
  return largest;
}

// The same of all values; what is found is then 0: taken.
template <int kPerLane>
__device__ __forceinline__ unsigned take_largest(unsigned (&orders)[kPerLane], int lane, int* index_of) {
  const unsigned largest = find_largest(orders, lane, [](int) { return true; }, index_of);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i * kWarpSize + lane == *index_of) orders[i] = 0;
  }
  return largest;
}

// Scores of a warp's logits, in place; -inf stands for none.
template <int kPerLane>
__device__ __forceinline__ void score(float (&values)[kPerLane], Scoring scoring, int lane) {
  if (scoring == Scoring::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) values[i] = 1.f / (1.f + expf(-values[i]));
    return;
  }
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) top = fmaxf(top, values[i]);
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
  double sum[1] = {0.0};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    values[i] = expf(values[i] - top);
    sum[0] += values[i];
  }
  const double total = warp_sums<1>(sum, lane);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) values[i] = static_cast<float>(values[i] / total);
}

// Takes the experts of all groups but those of the largest sums.
template <int kPerLane>
__device__ __forceinline__ void take_other_groups(const RouterParams& p, unsigned (&orders)[kPerLane],
                                                  int lane) {
  const int size = p.num_experts / p.num_groups;
  const auto is_inside = [&](int group, int i) { return unsigned(i - group * size) < unsigned(size); };
  unsigned sums[1] = {0};  // lane g: the order of group g's sum
#pragma unroll 1
  for (int group = 0; group < p.num_groups; ++group) {
    int first = -1, index;
    float sum = 0.f;
#pragma unroll 1
    for (int top = 0; top < p.group_tops; ++top) {
      const auto is_wanted = [&](int i) { return is_inside(group, i) && i != first; };
      sum += score_of(find_largest(orders, lane, is_wanted, &index));
      first = index;
    }
    if (lane == group) sums[0] = order_of(sum);
  }
  unsigned is_in = 0;  // bit g: group g
#pragma unroll 1
  for (int k = 0; k < p.top_groups; ++k) {
    int group;
    take_largest(sums, lane, &group);
    is_in |= 1u << group;
  }
#pragma unroll 1
  for (int group = 0; group < p.num_groups; ++group) {
    if (is_in >> group & 1) continue;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (is_inside(group, i * kWarpSize + lane)) orders[i] = 0;
    }
  }
}

// How a warp, with all its lanes, chooses for a row. kPerLane: scores a lane keeps; kIsPlain: every router
// is, which takes fewer registers.
template <int kPerLane, bool kIsPlain = false>
class Router {
 public:
  __device__ __forceinline__ Router(const RouterParams& p, int lane) : p_(p), lane_(lane) {}

  // Chooses of logit(0), ..., logit(num_experts - 1). Lane k returns the k-th choice, equal scores in the
  // order of their indices, NaN in front; lanes from top_k on return -1.
  template <class Logit>
  __device__ __forceinline__ int choose(const Logit& logit) {
    const int count = p_.num_experts;
    unsigned orders[kPerLane];  // 0: taken, or none
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int index = i * kWarpSize + lane_;
      const float found = logit(min(index, count - 1));
      scores_[i] = index < count ? found : -INFINITY;
    }
    if (!is_plain()) score(scores_, p_.scoring, lane_);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int index = i * kWarpSize + lane_;
      orders[i] = index < count ? order_of(scores_[i]) : 0;
    }
    if (!is_plain() && p_.bias) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int index = i * kWarpSize + lane_;
        if (index < count) orders[i] = order_of(scores_[i] + load_as_float(p_.bias, index, p_.bias_dtype));
      }
    }
    if (!is_plain() && p_.num_groups > 1) take_other_groups(p_, orders, lane_);
    mine_ = -1;
#pragma unroll 1
    for (int k = 0; k < p_.top_k; ++k) {
      int index;
      const unsigned largest = take_largest(orders, lane_, &index);
      if (lane_ == k) mine_ = index, chosen_ = score_of(largest);
    }
    return mine_;
  }

  // The weight of what choose() returned, 0 without. Sums are float64: additions in float32 would cost more
  // than the one rounding at the end.
  __device__ __forceinline__ float weight() const {
    float share = 0.f;
    if (!is_plain()) {
#pragma unroll 1
      for (int k = 0; k < p_.top_k; ++k) {
        const float score = score_at(__shfl_sync(kAllLanes, mine_, k));
        if (lane_ == k) share = score;
      }
      double sum[1] = {share};
      const double total = warp_sums<1>(sum, lane_) + p_.sum_eps;
      return static_cast<float>((p_.normalized ? share / total : share) * p_.factor);
    }
    const float top = __shfl_sync(kAllLanes, chosen_, 0);
    if (mine_ >= 0) share = expf(chosen_ - top);
    double sum[1] = {share};
    if (!p_.normalized) {
      sum[0] = 0.0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum[0] += expf(scores_[i] - top);
    }
    return static_cast<float>(share / warp_sums<1>(sum, lane_));
  }

 private:
  __device__ __forceinline__ bool is_plain() const { return kIsPlain || p_.is_plain; }

  // Returns a score without its bias.
  __device__ __forceinline__ float score_at(int index) const {
    float own = 0.f;  // in the lane that has it
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * kWarpSize + lane_ == index) own = scores_[i];
    }
    return __shfl_sync(kAllLanes, own, index % kWarpSize);
  }

  const RouterParams& p_;
  const int lane_;
  float scores_[kPerLane];  // logits, if they say who is chosen
  int mine_;
  float chosen_;  // the logit, if it says so
};

}  // namespace hf_fastpath
