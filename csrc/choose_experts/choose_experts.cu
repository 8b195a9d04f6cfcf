// What: softmax or sigmoid of a row of a router's logits, the top_k largest scores (with a bias, of some
//   groups alone) with their indices, and weights made of them.
// Work split: a warp takes a row: router.cuh.
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
  const T* logits = static_cast<const T*>(p.logits) + int64_t(blockIdx.x) * p.router.num_experts;
  wait_for_previous_kernel();
  const auto logit = [&](int i) { return to_float(Chunk<T, 1>::load_l2(logits + i)); };
  Router<kPerLane> router(p.router, lane);
  const int expert = router.choose(logit);
  const float weight = router.weight();
  if (lane >= p.router.top_k) return;
  const int64_t place = int64_t(blockIdx.x) * p.router.top_k + lane;
  p.weights[place] = p.router.rounded ? to_float(from_float<T>(weight)) : weight;
  p.ids[place] = expert;
}

}  // namespace

void launch_choose_experts(const ChooseExpertsParams& p, cudaStream_t stream) {
  const dim3 grid(p.rows), block(kWarpSize);
  const size_t smem_bytes = 0;
  with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = p.router.num_experts <= kFewLogits * kWarpSize
                            ? choose_experts_kernel<T, kFewLogits>
                            : choose_experts_kernel<T, kMaxRoutedTo / kWarpSize>;
    HF_FASTPATH_CUDA_CHECK(
        launch_programmatic(kernel, grid, block, smem_bytes, stream, p.programmatic_launch, p));
  });
}

}  // namespace hf_fastpath
