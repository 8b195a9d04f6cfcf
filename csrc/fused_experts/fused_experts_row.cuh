// What a block does in front of the experts' products of one row: it finds the choices and norms x, for
// itself.
#pragma once

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "fused_experts/fused_experts.h"
#include "fused_experts/fused_experts_device.cuh"
#include "topk_softmax/choose.cuh"

namespace hf_fastpath {

// The `lane`-th choice of the only row, expert -1 if there is none, whoever chooses; all lanes of a warp are
// here.
template <class T>
__device__ __forceinline__ Choice only_choice(const FusedExpertsParams& p, int lane) {
  if (p.logits == nullptr) {
    const float weight = lane < p.top_k ? __ldcg(p.expert_weights + lane) : 0.f;
    return {static_cast<int>(choice(p, 0, lane)), weight};
  }
  static_assert(kMostRouted == kFewLogits * kWarpSize, "choose() takes them all");
  const bool is_wide = p.logits_dtype != p.dtype;  // float32: router_logits
  const auto logit = [&](int i) {
    if (is_wide) return Chunk<float, 1>::load_l2(static_cast<const float*>(p.logits) + i);
    return to_float(Chunk<T, 1>::load_l2(static_cast<const T*>(p.logits) + i));
  };
  Choice mine = choose<kFewLogits>(logit, p.num_scored, p.top_k, p.normalized, lane);
  mine.expert = static_cast<int>(place_of(p, mine.expert));
  if (p.rounded && !is_wide) mine.weight = to_float(from_float<T>(mine.weight));
  return mine;
}

// The experts that the rows of a block chose, each once, in the order of rows and choices.
template <int kX>
struct Chosen {
  static constexpr int kMost = kX * kMaxTopK;
  int count;
  int64_t expert[kMost];
  float weight[kMost][kX];  // of the expert in each row
  int source[kMost][kX];    // choice that the row's hidden features are kept by; -1: not chosen
};

// Fills `chosen` for the only row, with all lanes of one warp; a barrier has to follow.
template <class T>
__device__ __forceinline__ void find_only_chosen(const FusedExpertsParams& p, int lane, Chosen<1>& chosen) {
  const Choice mine = only_choice<T>(p, lane);
  const bool is_some = mine.expert >= 0 && lane < p.top_k;
  const unsigned same = __match_any_sync(kAllLanes, is_some ? mine.expert : -1);
  const bool is_first = is_some && __ffs(same) - 1 == lane;
  float weight = mine.weight;
  if (__any_sync(kAllLanes, is_some && !is_first)) {  // an expert was chosen twice
    weight = 0.f;
    for (int k = 0; k < p.top_k; ++k) {
      const float other = __shfl_sync(kAllLanes, mine.weight, k);
      if (same >> k & 1) weight += other;
    }
  }
  const unsigned firsts = __ballot_sync(kAllLanes, is_first);
  const int place = __popc(firsts & ((1u << lane) - 1));
  if (is_first)
    chosen.expert[place] = mine.expert, chosen.source[place][0] = lane, chosen.weight[place][0] = weight;
  if (lane == 0) chosen.count = __popc(firsts);
}

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
  const float scale = rsqrtf(squares / p.hidden_size + p.norm_eps);
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
