// What: the sum of a tensor over the GPUs of one host, plus residual; every rank gets the same bits.
// Work split: a thread takes one word of 16 bytes: it stores the word into the memory of every other rank,
//   waits for their words in its own, and adds all in the order of ranks. Threads wait for no thread of their
//   own GPU.
// Traffic: (size - 1) * elements * sizeof(T) over NVLink, each way; the same from device memory's L2.
// Roofline: latency of one store over NVLink until it can be read there, about 1 us, and of a poll. The
//   kernel behind starts at once and fetches its weights meanwhile.

#include "common/numeric.cuh"
#include "common/peers.cuh"
#include "sum_ranks/sum_ranks.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 128;  // few, so that words leave from several SMs

template <class T>
__global__ void __launch_bounds__(kThreads) sum_ranks_kernel(const __grid_constant__ SumRanksParams p) {
  constexpr int kElems = kVecElems<T>;
  using C = Chunk<T, kElems>;
  allow_next_kernel();
  const int64_t word = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (word >= p.elements / kElems) return;
  wait_for_previous_kernel();
  const int64_t at = word * kElems;
  const uint4 mine = C::load_l2(static_cast<const T*>(p.x) + at);
  const uint4 more = p.residual == nullptr ? C::zero() : C::load_l2(static_cast<const T*>(p.residual) + at);
  uint4 of[kMaxRanks];
  exchange(p.peers, word, mine, of);
  float total[kElems];
#pragma unroll
  for (int e = 0; e < kElems; ++e) total[e] = 0.f;
#pragma unroll
  for (int r = 0; r < kMaxRanks; ++r) {
    if (r >= p.peers.size) continue;
    float values[kElems];
    C::unpack(of[r], values);
#pragma unroll
    for (int e = 0; e < kElems; ++e) total[e] += values[e];
  }
  float values[kElems];
  C::unpack(more, values);
#pragma unroll
  for (int e = 0; e < kElems; ++e) total[e] += values[e];
  C::store(static_cast<T*>(p.out) + at, total);
  trace(TracePoint::kEnd);
}

}  // namespace

void launch_sum_ranks(const SumRanksParams& params, cudaStream_t stream) {
  if (params.elements == 0) return;
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t words = params.elements / kVecElems<T>;
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(sum_ranks_kernel<T>, dim3((words + kThreads - 1) / kThreads),
                                               dim3(kThreads), 0, stream, params.programmatic_launch,
                                               params));
  });
}

}  // namespace hf_fastpath
