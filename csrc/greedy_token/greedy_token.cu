// What: the argmax of every row of logits, and the bookkeeping that makes the next step ready.
// Work split: one block a row; a thread takes every 1024th chunk of 16 bytes (of one element where rows are
// not
//   aligned) and keeps the best, blocks reduce over warps.
// Traffic: batch * vocab_size * sizeof(T) once, out of L2, where the product in front left it.
// Roofline: latency: a few dependent reads of L2 and two barriers.

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "greedy_token/greedy_token.h"
#include "greedy_token/greedy_token_cuda.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 1024;
constexpr int kUnroll = 4;  // loads in flight a thread

__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

template <class T, int kElems>
__global__ void __launch_bounds__(kThreads) greedy_token_kernel(const __grid_constant__ GreedyTokenParams p) {
  using C = Chunk<T, kElems>;
  allow_next_kernel();
  wait_for_previous_kernel();
  const int row = blockIdx.x, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const T* logits = static_cast<const T*>(p.logits) + row * p.stride;
  const int64_t chunks = p.vocab_size / kElems;
  uint64_t best = 0;
  for (int64_t base = threadIdx.x; base < chunks; base += kThreads * kUnroll) {
    typename C::Raw raw[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t chunk = base + u * kThreads;
      raw[u] = C::load_l2(logits + (chunk < chunks ? chunk : base) * kElems);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t chunk = base + u * kThreads;
      float values[kElems];
      C::unpack(raw[u], values);
#pragma unroll
      for (int e = 0; e < kElems; ++e) {
        const uint64_t here = preference(values[e], (chunk < chunks ? chunk : base) * kElems + e);
        best = here > best ? here : best;
      }
    }
  }
  for (int64_t i = chunks * kElems + threadIdx.x; i < p.vocab_size; i += kThreads) {
    const uint64_t here = preference(to_float(__ldcg(logits + i)), i);
    best = here > best ? here : best;
  }
  __shared__ uint64_t bests[kThreads / kWarpSize];
  best = warp_max(best);
  if (lane == 0) bests[warp] = best;
  __syncthreads();  // every warp's best
  if (warp != 0) return;
  best = warp_max(bests[lane]);
  if (lane == 0) take_token(p, row, preferred_index(best));
  trace(TracePoint::kEnd);
}

}  // namespace

void launch_greedy_token(const GreedyTokenParams& params, cudaStream_t stream) {
  if (params.batch == 0) return;
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kElems = kVecElems<T>;
    const bool aligned = is_aligned16(params.logits) && (params.batch == 1 || params.stride % kElems == 0);
    const auto kernel = aligned ? greedy_token_kernel<T, kElems> : greedy_token_kernel<T, 1>;
    HF_FASTPATH_CUDA_CHECK(
        launch_overlapping(kernel, dim3(params.batch), dim3(kThreads), 0, stream, params.overlap, params));
  });
}

}  // namespace hf_fastpath
