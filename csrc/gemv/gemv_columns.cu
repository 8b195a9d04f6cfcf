// What: x rows times weights stored [k, n] (Conv1D) on CUDA cores, with bias, activation and residual:
//   float32, and 16-bit weights whose rows are not aligned.
// Work split: a block takes kLanesN * kElems neighboring outputs; a lane owns kElems of them (16 bytes of a
//   weight row), the other lanes of a warp and the warps of the block take different rows; see
//   gemv_columns.cuh for the split of k over a cluster. A lane keeps kUnroll loads in flight and replaces
//   each as it is used.
// Traffic: n * k * sizeof(T) once, plus x per SM out of L2.
// Roofline: read bandwidth for large weights, launch and memory latency at GPT-2's sizes. float32, one x row:
//   29 % of read bandwidth for 768 to 2304, 36 % for 3072 to 768 (H200, 2026-11).

#include "gemv/gemv_columns.cuh"

namespace hf_fastpath {
namespace {

constexpr int kUnroll = 4;  // weight loads in flight a lane

// Lanes of a warp side by side in n: 8 * 16 bytes are a full 128-byte line; one element a lane wants all 32.
template <int kElems>
constexpr int kLanesN = kElems == 1 ? 32 : 8;

template <class T, int kElems, int kX>
__global__ void __launch_bounds__(kColumnThreads, 2) gemv_columns_kernel(GemvParams p, int cluster) {
  using C = Chunk<T, kElems>;
  constexpr int kLanes = kLanesN<kElems>;
  constexpr int kColumns = kLanes * kElems;                       // outputs of a block
  constexpr int kRowsAtOnce = kColumnWarps * kWarpSize / kLanes;  // weight rows the block loads side by side
  __shared__ float sums[kColumnWarps][kX][kColumns];

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int rank = blockIdx.x % cluster;  // blocks of a cluster are neighbors in the grid
  const int first_column = blockIdx.x / cluster * kColumns;
  const int column = first_column + (lane % kLanes) * kElems;
  const bool has_column = column < p.n;  // n is a multiple of kElems here
  const int64_t stride = p.segments[0].stride;
  const T* x = static_cast<const T*>(p.x);

  announce_block(cluster);
  const auto addends = load_column_addends<T, kX, kColumns>(p, rank, first_column);

  const RowRange range = row_range(p.k, rank, cluster);
  int row = range.begin + warp * (kWarpSize / kLanes) + lane / kLanes;
  const T* weight = static_cast<const T*>(p.segments[0].weight) + column;

  typename C::Raw raw[kUnroll];
  T x_raw[kUnroll];
  const auto load = [&](int u, int from) {
    const int r = from + u * kRowsAtOnce;
    raw[u] = has_column && r < range.end ? C::load_streaming(weight + r * stride) : C::zero();
    // As far ahead as the weights: L1 answers in order, so a load issued late waits for all weights before
    // it.
    if (kX == 1) x_raw[u] = r < range.end ? __ldg(x + r) : from_float<T>(0.f);
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load(u, row);

  float acc[kX][kElems] = {};
#pragma unroll 1
  for (; row - lane / kLanes < range.end; row += kUnroll * kRowsAtOnce) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int r = row + u * kRowsAtOnce;
      float w[kElems];
      C::unpack(raw[u], w);
#pragma unroll
      for (int m = 0; m < kX; ++m) {
        if (kX > 1 && m >= p.m) break;
        if (kX > 1) x_raw[u] = r < range.end ? __ldg(x + m * p.k + r) : from_float<T>(0.f);
        const float xs = to_float(x_raw[u]);
#pragma unroll
        for (int e = 0; e < kElems; ++e) acc[m][e] = fmaf(w[e], xs, acc[m][e]);
      }
      load(u, row + kUnroll * kRowsAtOnce);
    }
  }

  // Lanes with the same columns.
#pragma unroll
  for (int m = 0; m < kX; ++m)
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
#pragma unroll
      for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
        acc[m][e] += __shfl_xor_sync(kAllLanes, acc[m][e], offset);
      }
      if (lane < kLanes) sums[warp][m][lane * kElems + e] = acc[m][e];
    }
  merge_columns<T>(p, sums, addends, cluster, rank, first_column);
}

template <class T, int kElems, int kX>
void launch(const GemvParams& p, cudaStream_t stream) {
  constexpr int kColumns = kLanesN<kElems> * kElems;
  const int column_blocks = (p.n + kColumns - 1) / kColumns;
  const int cluster = choose_cluster(p, column_blocks, kClusterLimit<kX, kColumns>);
  launch_columns_kernel(gemv_columns_kernel<T, kElems, kX>, p, column_blocks, cluster, stream);
}

template <class T, int kElems>
void launch_x_rows(const GemvParams& p, cudaStream_t stream) {
  if (p.m == 1) return launch<T, kElems, 1>(p, stream);
  if (p.m <= 4) return launch<T, kElems, 4>(p, stream);
  return launch<T, kElems, 16>(p, stream);
}

}  // namespace

void launch_gemv_columns(const GemvParams& params, cudaStream_t stream) {
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (sizeof(T) == 4) {  // aligned 16-bit weights go to gemv_columns_mma.cu
      const GemvSegment& s = params.segments[0];
      if (is_aligned16(s.weight) && s.stride % kVecElems<T> == 0 && params.n % kVecElems<T> == 0) {
        return launch_x_rows<T, kVecElems<T>>(params, stream);
      }
    }
    launch_x_rows<T, 1>(params, stream);
  });
}

}  // namespace hf_fastpath
