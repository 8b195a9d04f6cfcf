// What a block does in front of the experts' products of one row: it finds the choices and norms x, for
// itself.
#pragma once

#include "choose_experts/router.cuh"
#include "common/async.cuh"
#include "common/inverse_root.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "fused_experts/fused_experts.h"
#include "fused_experts/fused_experts_device.cuh"

namespace hf_fastpath {

// The experts that the rows of a block chose, each once, in the order of rows and choices; behind the places
// of a shared expert, which have no number.
template <int kX>
struct Chosen {
  static constexpr int kMost = kX * kMaxTopK;
  int count;
  int64_t expert[kMost];
  float weight[kMost][kX];  // of the expert in each row
  int source[kMost][kX];    // choice that the row's hidden features are kept by; -1: not chosen
};

// The weight of the shared expert in the only row.
template <class T>
__device__ __forceinline__ float shared_weight(const SharedExpert& shared) {
  if (shared.logit == nullptr) return 1.f;
  return times_sigmoid<true>(1.f, to_float(Chunk<T, 1>::load_l2(static_cast<const T*>(shared.logit))));
}

// Row n of what is down at a place of the only row's list, from its first column on.
template <class T>
__device__ __forceinline__ const T* down_row(const FusedExpertsParams& p, const Chosen<1>& chosen, int place,
                                             int n) {
  if (place >= p.shared.places) return stack_row<T>(p.down, chosen.expert[place], n);
  return static_cast<const T*>(p.shared.down) + n * p.shared.down_stride + place * p.width;
}

// How one warp, with all its lanes, finds what the only row has chosen, whoever chooses.
template <class T, int kPerLane>
class OnlyRow {
 public:
  __device__ __forceinline__ OnlyRow(const FusedExpertsParams& p, int lane)
      : p_(p), lane_(lane), router_(p.router, lane) {}

  // Fills `chosen` but for its weights; a barrier has to follow.
  __device__ __forceinline__ void find(Chosen<1>& chosen) {
    const int expert = only_choice();
    const bool is_some = expert >= 0 && lane_ < p_.top_k;
    same_ = __match_any_sync(kAllLanes, is_some ? expert : -1);
    is_first_ = is_some && __ffs(same_) - 1 == lane_;
    const unsigned firsts = __ballot_sync(kAllLanes, is_first_);
    is_repeated_ = __any_sync(kAllLanes, is_some && !is_first_);
    const int places = p_.shared.places;
    place_ = places + __popc(firsts & ((1u << lane_) - 1));
    if (is_first_) chosen.expert[place_] = expert, chosen.source[place_][0] = lane_;
    if (lane_ < places) chosen.source[lane_][0] = p_.top_k + lane_;
    if (lane_ == 0) chosen.count = places + __popc(firsts);
  }

  // Fills the weights, behind find(); a barrier has to follow.
  __device__ __forceinline__ void weigh(Chosen<1>& chosen) const {
    float weight = only_weight();
    if (is_repeated_) {  // an expert was chosen more than once
      const float own = weight;
      weight = 0.f;
      for (int k = 0; k < p_.top_k; ++k) {
        const float other = __shfl_sync(kAllLanes, own, k);
        if (same_ >> k & 1) weight += other;
      }
    }
    if (is_first_) chosen.weight[place_][0] = weight;
    if (lane_ < p_.shared.places) chosen.weight[lane_][0] = shared_weight<T>(p_.shared);
  }

 private:
  __device__ __forceinline__ bool is_wide() const { return p_.logits_dtype != p_.dtype; }  // float32

  // The lane's choice, or -1.
  __device__ __forceinline__ int only_choice() {
    if (p_.logits == nullptr) return static_cast<int>(choice(p_, 0, lane_));
    const auto logit = [&](int i) {
      if (is_wide()) return Chunk<float, 1>::load_l2(static_cast<const float*>(p_.logits) + i);
      return to_float(Chunk<T, 1>::load_l2(static_cast<const T*>(p_.logits) + i));
    };
    return static_cast<int>(place_of(p_, router_.choose(logit)));
  }

  __device__ __forceinline__ float only_weight() const {
    if (p_.logits == nullptr) return lane_ < p_.top_k ? __ldcg(p_.expert_weights + lane_) : 0.f;
    const float weight = router_.weight();
    return p_.router.rounded && !is_wide() ? to_float(from_float<T>(weight)) : weight;
  }

  const FusedExpertsParams& p_;
  const int lane_;
  Router<kPerLane, (kPerLane > kFewLogits)> router_;
  unsigned same_ = 0;  // lanes with the lane's choice
  int place_ = 0;
  bool is_first_ = false, is_repeated_ = false;  // of the lane; anywhere
};

// Copies x of the only row, normed, into shared memory, in chunks of kElems up to `padded`, with zeros behind
// the last: by kWarps warps, of which this is the `warp`-th, while others do something else. A barrier has to
// follow.
template <class T, int kElems, int kWarps>
__device__ __forceinline__ void load_row(const FusedExpertsParams& p, int padded, int warp, int lane,
                                         T* row) {
  using C = Chunk<T, kElems>;
  using Raw = typename C::Raw;
  __shared__ float squares_of[kWarps];
  const int chunks = p.hidden_size / kElems, first = warp * kWarpSize + lane;
  constexpr int kThreads = kWarps * kWarpSize;
  float squares = 0.f;
  for (int i = first; i < padded; i += kThreads) {
    const Raw raw = i < chunks ? C::load_l2(static_cast<const T*>(p.x) + int64_t(i) * kElems) : C::zero();
    reinterpret_cast<Raw*>(row)[i] = raw;
    float values[kElems];
    C::unpack(raw, values);
#pragma unroll
    for (int e = 0; e < kElems; ++e) squares = fmaf(values[e], values[e], squares);
  }
  if (p.norm_weight == nullptr) return;
  squares = warp_sum(squares);
  if (lane == 0) squares_of[warp] = squares;
  sync_some(1, kThreads);  // every warp's sum
  squares = warp_sum(lane < kWarps ? squares_of[lane] : 0.f);
  const float scale = inverse_root<T>(squares / p.hidden_size + p.norm_eps);
  for (int i = first; i < chunks; i += kThreads) {  // a thread's own
    float values[kElems], factors[kElems];
    C::unpack(reinterpret_cast<const Raw*>(row)[i], values);
    C::unpack(C::load_shared_line(static_cast<const T*>(p.norm_weight) + int64_t(i) * kElems), factors);
#pragma unroll
    for (int e = 0; e < kElems; ++e) values[e] *= scale * (factors[e] + p.norm_offset);
    C::store(row + int64_t(i) * kElems, values);
  }
}

// Brings the norm's weight into L2 while the kernel in front still runs.
template <class T>
__device__ __forceinline__ void prefetch_norm(const FusedExpertsParams& p) {
  if (p.norm_weight == nullptr || !p.programmatic_launch) return;
  const char* weight = static_cast<const char*>(p.norm_weight);
  const int bytes = p.hidden_size * static_cast<int>(sizeof(T));
  for (int at = threadIdx.x * 128; at < bytes; at += blockDim.x * 128) prefetch_l2(weight + at);
}

// Chunks of a row, up to a multiple of kMultiple.
template <int kElems, int kMultiple>
__host__ __device__ constexpr int padded_chunks(int hidden_size) {
  return (hidden_size / kElems + kMultiple - 1) / kMultiple * kMultiple;
}

}  // namespace hf_fastpath
