// What both kernels of a mixture's experts share: which expert a block works on, for which rows, and the
// grid.
#pragma once

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "fused_experts/fused_experts.h"
#include "topk_softmax/choose.cuh"

namespace hf_fastpath {

constexpr int kMaxX = 8;  // x rows a kernel takes at once; more are further blocks, which read weights again
static_assert(kMaxTopK == kWarpSize, "a lane reads one choice");

// First element of row `row` of an expert's matrix.
template <class T>
__device__ __forceinline__ const T* stack_row(const ExpertStack& stack, int64_t expert, int row) {
  return static_cast<const T*>(stack.weight) + expert * stack.expert_stride + row * stack.row_stride;
}

// The `lane`-th choice of row m, or -1 if there is none. From L2: it was written just before.
__device__ __forceinline__ int64_t choice(const FusedExpertsParams& p, int m, int lane) {
  if (m >= p.rows || lane >= p.top_k) return -1;
  const int64_t expert = __ldcg(p.expert_ids + m * p.top_k + lane);
  return expert >= 0 && expert < p.num_experts ? expert : -1;
}

// The same of the only row, with its weight, whoever chooses; all lanes of a warp are here.
template <class T>
__device__ __forceinline__ Choice only_choice(const FusedExpertsParams& p, int lane) {
  if (p.logits == nullptr) {
    const float weight = lane < p.top_k ? __ldcg(p.expert_weights + lane) : 0.f;
    return {static_cast<int>(choice(p, 0, lane)), weight};
  }
  static_assert(kMostRouted == kFewLogits * kWarpSize, "choose() takes them all");
  const auto logit = [&](int i) {
    return to_float(Chunk<T, 1>::load_l2(static_cast<const T*>(p.logits) + i));
  };
  Choice mine = choose<kFewLogits>(logit, static_cast<int>(p.num_experts), p.top_k, p.normalized, lane);
  if (p.rounded) mine.weight = to_float(from_float<T>(mine.weight));
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

// What a block of expert_grid works on: an expert, and which choice of each of its rows that is. kX: x rows
// kept, at least the rows of a block.
template <int kX>
struct ExpertWork {
  int64_t expert;
  int first_row;
  int source[kX];  // -1: not chosen
  bool is_some;    // else there is no such expert, or another block has it
};

template <class T, int kX>
__device__ __forceinline__ ExpertWork<kX> find_work(const FusedExpertsParams& p, int lane) {
  ExpertWork<kX> work;
  work.first_row = blockIdx.z * kMaxX;
  if constexpr (kX == 1) {  // of the only row
    const int expert = only_choice<T>(p, lane).expert;
    work.expert = __shfl_sync(kAllLanes, expert, blockIdx.y);
    work.source[0] = __ffs(__ballot_sync(kAllLanes, expert == work.expert)) - 1;
    work.is_some = work.expert >= 0 && work.source[0] == static_cast<int>(blockIdx.y);
    return work;
  }
  const int mine = blockIdx.y / p.top_k, k = blockIdx.y % p.top_k;
  work.expert = choice(p, work.first_row + mine, k);
  work.is_some = work.expert >= 0;
#pragma unroll
  for (int m = 0; m < kX; ++m) {
    const unsigned same =
        __ballot_sync(kAllLanes, choice(p, work.first_row + m, lane) == work.expert && work.expert >= 0);
    work.source[m] = __ffs(same) - 1;
    if ((m < mine && same != 0) || (m == mine && work.source[m] != k)) work.is_some = false;
  }
  return work;
}

// Groups of kMaxX rows.
inline int row_groups(const FusedExpertsParams& p) { return (p.rows + kMaxX - 1) / kMaxX; }

// Grid (blocks over `features`, choices of a group's rows, groups).
inline dim3 expert_grid(const FusedExpertsParams& p, int features, int features_per_block) {
  const int rows = p.rows < kMaxX ? p.rows : kMaxX;
  return dim3((features + features_per_block - 1) / features_per_block, rows * p.top_k, row_groups(p));
}

// Whether every row of the stack, `columns` long, starts a 16-byte access and is made of whole ones.
inline bool is_aligned(const ExpertStack& stack, int columns, int elems) {
  return is_aligned16(stack.weight) && stack.expert_stride % elems == 0 && stack.row_stride % elems == 0 &&
         columns % elems == 0;
}

}  // namespace hf_fastpath
