// What both kernels of a mixture's experts share: which expert a block works on, for which rows, and the
// grid.
#pragma once

#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "fused_experts/fused_experts.h"

namespace hf_fastpath {

constexpr int kMaxX = 8;  // x rows a kernel takes at once; more are further blocks, which read weights again
static_assert(kMaxTopK == kWarpSize, "a lane reads one choice");

// First element of row `row` of an expert's matrix.
template <class T>
__device__ __forceinline__ const T* stack_row(const ExpertStack& stack, int64_t expert, int row) {
  return static_cast<const T*>(stack.weight) + expert * stack.expert_stride + row * stack.row_stride;
}

// The matrices of expert `id`: their number, or -1 if there are none.
__device__ __forceinline__ int64_t place_of(const FusedExpertsParams& p, int64_t id) {
  const int64_t place = id - p.first_expert;
  return place >= 0 && place < p.num_experts ? place : -1;
}

// The `lane`-th choice of row m, or -1 if there is none. From L2: it was written just before.
__device__ __forceinline__ int64_t choice(const FusedExpertsParams& p, int m, int lane) {
  if (m >= p.rows || lane >= p.top_k) return -1;
  return place_of(p, __ldcg(p.expert_ids + m * p.top_k + lane));
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

template <int kX>
__device__ __forceinline__ ExpertWork<kX> find_work(const FusedExpertsParams& p, int lane) {
  ExpertWork<kX> work;
  work.first_row = blockIdx.z * kMaxX;
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

inline bool is_aligned(const SharedExpert& shared, int elems) {
  return shared.places == 0 || (is_aligned16(shared.gate) && is_aligned16(shared.up) &&
                                is_aligned16(shared.down) && shared.gate_stride % elems == 0 &&
                                shared.up_stride % elems == 0 && shared.down_stride % elems == 0);
}

}  // namespace hf_fastpath
