// What: the experts of packed_experts_kernel.cuh by format; and the sum of what a row's choices give.
// Work split: of the sum, a thread an output.
// Traffic: rows * top_k * hidden_size * 4 bytes, which lie in L2.
// Roofline: latency.
#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "packed_experts/packed_experts.h"

namespace hf_fastpath {
namespace {

constexpr int kSumThreads = 128;

template <class T>
__global__ void __launch_bounds__(kSumThreads) packed_experts_sum_kernel(const PackedExpertsSum p) {
  __shared__ int source[kMaxPackedChoices];  // choice whose product it is; -1: none
  __shared__ float weight[kMaxPackedChoices];
  const int m = blockIdx.y, top_k = p.choices.top_k, n = blockIdx.x * kSumThreads + threadIdx.x;
  allow_next_kernel();
  wait_for_previous_kernel();
  if (int(threadIdx.x) < top_k) {
    const int64_t* const ids = p.choices.ids + int64_t(m) * top_k;
    const int64_t id = __ldcg(ids + threadIdx.x);
    int first = threadIdx.x;
    for (int k = int(threadIdx.x) - 1; k >= 0; --k) first = __ldcg(ids + k) == id ? k : first;
    source[threadIdx.x] = id >= 0 && id < p.choices.num_experts ? first : -1;
    weight[threadIdx.x] = __ldcg(p.choices.weights + int64_t(m) * top_k + threadIdx.x);
  }
  __syncthreads();  // sources and weights
  if (n >= p.hidden_size) return;
  const float* const products = p.products + int64_t(m) * top_k * p.hidden_size + n;
  float sum = 0.f;
#pragma unroll 4
  for (int k = 0; k < top_k; ++k) {
    if (source[k] >= 0) sum = fmaf(weight[k], __ldcg(products + int64_t(source[k]) * p.hidden_size), sum);
  }
  const int64_t at = int64_t(m) * p.hidden_size + n;
  if (p.residual) sum += to_float(Chunk<T, 1>::load_l2(static_cast<const T*>(p.residual) + at));
  static_cast<T*>(p.out)[at] = from_float<T>(sum);
}

}  // namespace

void launch_packed_experts(const PackedExpertsProduct& params, cudaStream_t stream) {
  if (reads_records(params.matrix.format)) return launch_packed_experts_records(params, stream);
  with_gpu_experts_format(params.matrix.format, [&](auto format) {
    launch_packed_experts_format<decltype(format)::value>(params, stream);
  });
}

void launch_packed_experts_sum(const PackedExpertsSum& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    const dim3 grid((p.hidden_size + kSumThreads - 1) / kSumThreads, p.choices.rows);
    // The kernel in front is our own: it writes nothing that is read early.
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(packed_experts_sum_kernel<decltype(zero)>, grid,
                                               dim3(kSumThreads), size_t(0), stream, true, p));
  });
}

}  // namespace hf_fastpath
