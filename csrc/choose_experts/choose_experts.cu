// What: softmax or sigmoid of a row of a router's logits, the top_k largest scores (with a bias, of some
//   groups alone) with their indices, and weights made of them.
// Work split: a warp takes a row and keeps it in registers, interleaved over the lanes. It finds the largest
//   value top_k times, each time by a maximum of values and a minimum of indices over the warp; groups' sums
//   in the same way. Without bias and groups it chooses by logits (router.cuh).
// Traffic: rows * num_experts * sizeof(T), and 12 bytes a choice: a few KB.
// Roofline: latency: of the load, two reductions and top_k more; 8 of 128 in 2.7 us (H200, 2026-11).

#include "choose_experts/choose_experts.h"
#include "choose_experts/router.cuh"
#include "common/async.cuh"
#include "common/numeric.cuh"

namespace hf_fastpath {
namespace {

// kPerLane: scores a lane keeps.
template <class T, int kPerLane>
__global__ void __launch_bounds__(kWarpSize) choose_experts_kernel(ChooseExpertsParams p) {
  allow_next_kernel();
  const int lane = threadIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + int64_t(blockIdx.x) * p.num_experts;
  wait_for_previous_kernel();
  const auto logit = [&](int i) { return to_float(Chunk<T, 1>::load_l2(logits + i)); };
  Router<kPerLane> router;
  const int expert = router.choose(logit, p.num_experts, p.top_k, lane);
  const float weight = router.weight(p.normalized, lane);
  if (lane >= p.top_k) return;
  const int64_t place = int64_t(blockIdx.x) * p.top_k + lane;
  p.weights[place] = p.rounded ? to_float(from_float<T>(weight)) : weight;
  p.ids[place] = expert;
}

// Element i of the bias.
__device__ __forceinline__ float bias_at(const ChooseExpertsParams& p, int i) {
  switch (p.bias_dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(p.bias)[i];
    case DType::kFloat16:
      return to_float(static_cast<const __half*>(p.bias)[i]);
    default:
      return to_float(static_cast<const __nv_bfloat16*>(p.bias)[i]);
  }
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
__device__ __forceinline__ void take_other_groups(const ChooseExpertsParams& p, unsigned (&orders)[kPerLane],
                                                  int lane) {
  const int size = p.num_experts / p.num_groups;
  unsigned sums[1] = {0};  // lane g: the order of group g's sum
  int index;
#pragma unroll 1
  for (int group = 0; group < p.num_groups; ++group) {
    unsigned inside[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) inside[i] = (i * kWarpSize + lane) / size == group ? orders[i] : 0;
    float sum = 0.f;
    for (int top = 0; top < p.group_tops; ++top) sum += score_of(take_largest(inside, lane, &index));
    if (lane == group) sums[0] = order_of(sum);
  }
  unsigned is_in = 0;  // bit g: group g
  for (int k = 0; k < p.top_groups; ++k) {
    take_largest(sums, lane, &index);
    is_in |= 1u << index;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int group = (i * kWarpSize + lane) / size;
    if (group >= p.num_groups || !(is_in >> group & 1)) orders[i] = 0;
  }
}

template <class T, int kPerLane>
__global__ void __launch_bounds__(kWarpSize) choose_scored_kernel(ChooseExpertsParams p) {
  allow_next_kernel();
  const int lane = threadIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + int64_t(blockIdx.x) * p.num_experts;
  wait_for_previous_kernel();
  float scores[kPerLane];
  unsigned orders[kPerLane];  // 0: taken, or none
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * kWarpSize + lane;
    scores[i] = index < p.num_experts ? to_float(Chunk<T, 1>::load_l2(logits + index)) : -INFINITY;
  }
  score(scores, p.scoring, lane);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * kWarpSize + lane;
    const bool present = index < p.num_experts;
    orders[i] = present ? order_of(scores[i] + (p.bias ? bias_at(p, index) : 0.f)) : 0;
  }
  if (p.num_groups > 1) take_other_groups(p, orders, lane);
  int mine = -1;
  float share = 0.f;
#pragma unroll 1
  for (int k = 0; k < p.top_k; ++k) {
    int index;
    take_largest(orders, lane, &index);
    float own = 0.f;  // in the lane that has it
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * kWarpSize + lane == index) own = scores[i];
    }
    own = __shfl_sync(kAllLanes, own, index % kWarpSize);
    if (lane == k) mine = index, share = own;
  }
  double sum[1] = {share};
  const double total = warp_sums<1>(sum, lane) + p.sum_eps;
  if (lane >= p.top_k) return;
  const float weight = static_cast<float>((p.normalized ? share / total : share) * p.factor);
  const int64_t place = int64_t(blockIdx.x) * p.top_k + lane;
  p.weights[place] = p.rounded ? to_float(from_float<T>(weight)) : weight;
  p.ids[place] = mine;
}

template <class T, int kPerLane>
auto kernel_of(const ChooseExpertsParams& p) {
  return p.is_plain ? choose_experts_kernel<T, kPerLane> : choose_scored_kernel<T, kPerLane>;
}

}  // namespace

void launch_choose_experts(const ChooseExpertsParams& p, cudaStream_t stream) {
  const dim3 grid(p.rows), block(kWarpSize);
  const size_t smem_bytes = 0;
  with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = p.num_experts <= kFewLogits * kWarpSize ? kernel_of<T, kFewLogits>(p)
                                                                : kernel_of<T, kMaxRoutedTo / kWarpSize>(p);
    HF_FASTPATH_CUDA_CHECK(
        launch_programmatic(kernel, grid, block, smem_bytes, stream, p.programmatic_launch, p));
  });
}

}  // namespace hf_fastpath
