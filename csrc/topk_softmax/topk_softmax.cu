// What: softmax of a row of router scores, its top_k largest values with their indices, and their sum made
//   one.
// Work split: a warp takes a row and keeps it in registers, interleaved over the lanes. It finds the largest
//   value top_k times, each time by a maximum of values and a minimum of indices over the warp.
// Traffic: rows * num_experts * sizeof(T), and 12 bytes a choice: a few KB.
// Roofline: latency: of the load, two reductions and top_k more; 8 of 128 in 2.7 us (H200, 2026-11).

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "topk_softmax/choose.cuh"
#include "topk_softmax/topk_softmax.h"

namespace hf_fastpath {
namespace {

// kPerLane: scores a lane keeps.
template <class T, int kPerLane>
__global__ void __launch_bounds__(kWarpSize) topk_softmax_kernel(TopkSoftmaxParams p) {
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

}  // namespace

void launch_topk_softmax(const TopkSoftmaxParams& p, cudaStream_t stream) {
  const dim3 grid(p.rows), block(kWarpSize);
  const size_t smem_bytes = 0;
  with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = p.num_experts <= kFewLogits * kWarpSize
                            ? topk_softmax_kernel<T, kFewLogits>
                            : topk_softmax_kernel<T, kMaxRoutedTo / kWarpSize>;
    HF_FASTPATH_CUDA_CHECK(
        launch_programmatic(kernel, grid, block, smem_bytes, stream, p.programmatic_launch, p));
  });
}

}  // namespace hf_fastpath
