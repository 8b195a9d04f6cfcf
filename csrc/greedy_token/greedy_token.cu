// What: the argmax of every row of logits, and the bookkeeping that makes the next step ready.
// Work split: one block a row, or on Hopper a cluster of blocks where rows are long; a thread takes chunks of
//   16 bytes (of one element where rows are not aligned) in turn and keeps the best, blocks reduce over
//   warps, and the first block of a cluster over its blocks, which send it theirs through distributed shared
//   memory.
// Traffic: batch * vocab_size * sizeof(T) once, out of L2, where the product in front left it.
// Roofline: latency: a few dependent reads of L2 and two barriers.

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "greedy_token/greedy_token.h"
#include "greedy_token/greedy_token_cuda.h"

namespace hf_fastpath {
namespace {

// A block of a cluster has so few that it is on an SM before the kernel in front ends; a block alone has
// more.
constexpr int kClusterThreads = 256, kAloneThreads = 1024;
constexpr int kUnroll = 4;       // loads in flight a thread
constexpr int kMinChunks = 128;  // of a row that a block of a cluster should have

__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
  const uint32_t high = __reduce_max_sync(kAllLanes, static_cast<uint32_t>(x >> 32));
  const uint32_t low = __reduce_max_sync(kAllLanes, x >> 32 == high ? static_cast<uint32_t>(x) : 0);
  return uint64_t(high) << 32 | low;
}

template <class T, int kElems, int kThreads>
__global__ void __launch_bounds__(kThreads)
    greedy_token_kernel(const __grid_constant__ GreedyTokenParams p, const int cluster) {
  using C = Chunk<T, kElems>;
  __shared__ uint64_t of_warps[kThreads / kWarpSize], of_blocks[kMaxCluster];
  const int rank = blockIdx.x % cluster, row = blockIdx.x / cluster;
  const int tid = threadIdx.x, lane = tid % kWarpSize, warp = tid / kWarpSize;
  const int first = rank * kThreads + tid, step = cluster * kThreads;
  allow_next_kernel();
  if (cluster > 1) {
    arrive_cluster();
    wait_cluster();  // all blocks run
  }
  // Nothing in front writes these.
  TokenState state = {};
  int64_t eos_token = 0;  // of the first 32, this lane's
  if (rank == 0 && warp == 0) {
    state = token_state(p, row);
    if (lane < p.num_eos_tokens) eos_token = p.eos_tokens[lane];
  }
  wait_for_previous_kernel();
  const T* logits = static_cast<const T*>(p.logits) + row * p.stride;
  const int64_t chunks = p.vocab_size / kElems;
  uint64_t best = 0;
  for (int64_t base = first; base < chunks; base += step * kUnroll) {
    typename C::Raw raw[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t chunk = base + u * step;
      raw[u] = C::load_l2(logits + (chunk < chunks ? chunk : base) * kElems);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t chunk = base + u * step;
      float values[kElems];
      C::unpack(raw[u], values);
#pragma unroll
      for (int e = 0; e < kElems; ++e) {
        const uint64_t here = preference(values[e], (chunk < chunks ? chunk : base) * kElems + e);
        best = here > best ? here : best;
      }
    }
  }
  for (int64_t i = chunks * kElems + first; i < p.vocab_size; i += step) {
    const uint64_t here = preference(to_float(Chunk<T, 1>::load_l2(logits + i)), i);
    best = here > best ? here : best;
  }
  best = warp_max(best);
  if (lane == 0) of_warps[warp] = best;
  __syncthreads();  // every warp's best
  best = warp_max(lane < kThreads / kWarpSize ? of_warps[lane] : 0);
  if (cluster > 1) {
    if (tid == 0) store_cluster(cluster_address(&of_blocks[rank], 0), best);
    __syncwarp();  // the barrier's halves want whole warps
    arrive_cluster();
    if (rank > 0) return;
    wait_cluster();  // every block's best
    best = warp_max(lane < cluster ? of_blocks[lane] : 0);
  }
  if (warp != 0) return;
  const int64_t token = taken_token(p, state, preferred_index(best));
  bool ends = lane < p.num_eos_tokens && eos_token == token;
  for (int64_t i = kWarpSize + lane; i < p.num_eos_tokens; i += kWarpSize) ends |= p.eos_tokens[i] == token;
  ends = __any_sync(kAllLanes, ends);
  if (lane == 0) take_token(p, row, state, token, ends);
  trace(TracePoint::kEnd);
}

}  // namespace

void launch_greedy_token(const GreedyTokenParams& params, cudaStream_t stream) {
  if (params.batch == 0) return;
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kElems = kVecElems<T>;
    const bool aligned = is_aligned16(params.logits) && (params.batch == 1 || params.stride % kElems == 0);
    const int64_t chunks = params.vocab_size / (aligned ? kElems : 1);
    const auto launch = [&](auto kernel, int threads, int cluster) {
      HF_FASTPATH_CUDA_CHECK(launch_clusters(kernel, dim3(params.batch * cluster), dim3(threads), 0, stream,
                                             params.programmatic_launch, cluster, params, cluster));
    };
    if (has_hopper_code() && chunks >= kMaxCluster * kMinChunks) {
      launch(aligned ? greedy_token_kernel<T, kElems, kClusterThreads>
                     : greedy_token_kernel<T, 1, kClusterThreads>,
             kClusterThreads, kMaxCluster);
    } else {
      launch(
          aligned ? greedy_token_kernel<T, kElems, kAloneThreads> : greedy_token_kernel<T, 1, kAloneThreads>,
          kAloneThreads, 1);
    }
  });
}

}  // namespace hf_fastpath
