// What: the features of all GPUs of one host side by side, for every row.
// Work split: a thread takes one word of 16 bytes, as in sum_ranks.
// Traffic: (size - 1) * rows * width * sizeof(T) over NVLink, each way; size * rows * width
//   * sizeof(T) is written.
// Roofline: NVLink's bandwidth for a vocabulary's logits: 128 KB of each of two ranks take 0.3 us (H100, on
//   paper).

#include "common/peers.cuh"
#include "gather_ranks/gather_ranks.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) gather_ranks_kernel(const __grid_constant__ GatherRanksParams p) {
  allow_next_kernel();
  const int64_t word = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (word >= p.rows * p.width) return;
  wait_for_previous_kernel();
  uint4 of[kMaxRanks];
  exchange(p.peers, word, __ldcg(static_cast<const uint4*>(p.x) + word), of);
  const int64_t row = word / p.width, column = word - row * p.width;
  const bool is_first = column < p.first_end, is_third = column >= p.second_end;
  const int64_t begin = is_first ? 0 : is_third ? p.second_end : p.first_end;
  const int64_t width = (is_first ? p.first_end : is_third ? p.width : p.second_end) - begin;
  uint4* out = static_cast<uint4*>(p.out) + (row * p.width + begin) * p.peers.size + column - begin;
#pragma unroll
  for (int r = 0; r < kMaxRanks; ++r) {
    if (r < p.peers.size) out[r * width] = of[r];
  }
  trace(TracePoint::kEnd);
}

}  // namespace

void launch_gather_ranks(const GatherRanksParams& params, cudaStream_t stream) {
  const int64_t words = params.rows * params.width;
  if (words == 0) return;
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(gather_ranks_kernel, dim3((words + kThreads - 1) / kThreads),
                                             dim3(kThreads), 0, stream, params.programmatic_launch, params));
}

}  // namespace hf_fastpath
