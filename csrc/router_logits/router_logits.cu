// What: x @ weight.T of a router, whose scores stay float32 so that experts are chosen as without rounding.
// Work split: grid (experts, groups of up to four rows). The threads of a block share one row of the weight,
//   which is on its way while the kernel in front still runs; their sums meet in shared memory.
// Traffic: experts * inputs * sizeof(W), once for four rows; x comes out of L2 for every block.
// Roofline: latency of one load of x behind the kernel in front: the weights are a few hundred KB.

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "router_logits/router_logits.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kAhead = 8;  // accesses of a thread in flight: 8,192 inputs of a weight in 16 bits

// kElems: of x, an access.
template <class T, class W, int kElems, int kBatch>
__global__ void __launch_bounds__(kThreads) router_logits_kernel(RouterLogitsParams p) {
  using X = Chunk<T, kElems>;
  constexpr int kElemsOfWeight = kElems == 1 ? 1 : kVecElems<W>;
  constexpr int kParts = kElems / kElemsOfWeight, kTurns = kAhead / kParts;
  using C = Chunk<W, kElemsOfWeight>;
  __shared__ double sums_of[kWarps][kBatch];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int inputs = static_cast<int>(p.inputs), own = threadIdx.x * kElems;
  const int64_t first_row = int64_t(blockIdx.y) * kBatch;
  const W* weight = static_cast<const W*>(p.weight) + blockIdx.x * p.weight_row_stride;
  typename C::Raw raw[kTurns][kParts];
  const auto load = [&](int start) {
#pragma unroll
    for (int a = 0; a < kTurns; ++a) {
      const int i = start + a * kThreads * kElems + own;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        raw[a][part] = i < inputs ? C::load_once(weight + i + part * kElemsOfWeight) : C::zero();
    }
  };
  allow_next_kernel();
  load(0);
  wait_for_previous_kernel();

  float sums[kBatch] = {};
#pragma unroll 1
  for (int start = 0; start < inputs; start += kTurns * kThreads * kElems) {
    if (start > 0) load(start);
#pragma unroll
    for (int a = 0; a < kTurns; ++a) {
      const int i = start + a * kThreads * kElems + own;
      if (i >= inputs) break;
      float w[kParts][kElemsOfWeight];
#pragma unroll
      for (int part = 0; part < kParts; ++part) C::unpack(raw[a][part], w[part]);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t row = min(first_row + b, p.rows - 1);
        float x[kElems];
        X::unpack(X::load_l2(static_cast<const T*>(p.x) + row * p.inputs + i), x);
#pragma unroll
        for (int e = 0; e < kElems; ++e)
          sums[b] = fmaf(w[e / kElemsOfWeight][e % kElemsOfWeight], x[e], sums[b]);
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    double sum[1] = {sums[b]};  // keeps every bit of a thread's sum
    const double total = warp_sums<1>(sum, lane);
    if (lane == 0) sums_of[warp][b] = total;
  }
  __syncthreads();  // every warp's sums
  if (threadIdx.x >= kBatch || first_row + threadIdx.x >= p.rows) return;
  double total = 0.0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums_of[w][threadIdx.x];
  p.out[(first_row + threadIdx.x) * p.outputs + blockIdx.x] = static_cast<float>(total);
}

template <class T, class W, int kElems, int kBatch>
void launch(const RouterLogitsParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.outputs), static_cast<unsigned>((p.rows + kBatch - 1) / kBatch));
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(router_logits_kernel<T, W, kElems, kBatch>, grid, dim3(kThreads),
                                             size_t(0), stream, p.programmatic_launch, p));
}

template <class T, class W>
void launch_of(const RouterLogitsParams& p, cudaStream_t stream) {
  constexpr int kElems = kVecElems<T>;
  const bool whole = p.inputs % kElems == 0 && p.weight_row_stride % kVecElems<W> == 0 &&
                     is_aligned16(p.weight) && is_aligned16(p.x);
  if (p.rows == 1) return whole ? launch<T, W, kElems, 1>(p, stream) : launch<T, W, 1, 1>(p, stream);
  return whole ? launch<T, W, kElems, 4>(p, stream) : launch<T, W, 1, 4>(p, stream);
}

}  // namespace

void launch_router_logits(const RouterLogitsParams& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    p.weight_dtype == p.dtype ? launch_of<T, T>(p, stream) : launch_of<T, float>(p, stream);
  });
}

}  // namespace hf_fastpath
