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

constexpr int kUnroll = 4;                      // weight loads in flight a lane
constexpr int64_t kMaxNormedBytes = 56 * 1024;  // of normed x in shared memory

// Lanes of a warp side by side in n: 8 * 16 bytes are a full 128-byte line; one element a lane wants all 32.
template <int kElems>
constexpr int kLanesN = kElems == 1 ? 32 : 8;

template <class T, int kElems, int kX>
__global__ void __launch_bounds__(kColumnThreads, 2)
    gemv_columns_kernel(const __grid_constant__ GemvParams p, const __grid_constant__ RopeAppendParams rope,
                        const __grid_constant__ ColumnsPlan plan) {
  using C = Chunk<T, kElems>;
  constexpr int kLanes = kLanesN<kElems>;
  constexpr int kColumns = kLanes * kElems;                       // outputs of a block
  constexpr int kRowsAtOnce = kColumnWarps * kWarpSize / kLanes;  // weight rows the block loads side by side
  __shared__ float sums[kColumnWarps][kX][kColumns];
  __shared__ AppendSlots slots;
  extern __shared__ __align__(16) char shared[];

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int rank = blockIdx.x % plan.cluster;  // blocks of a cluster are neighbors in the grid
  const int first_column = blockIdx.x / plan.cluster * kColumns;
  const int column = first_column + (lane % kLanes) * kElems;
  const bool has_column = column < p.n;  // n is a multiple of kElems here
  const int64_t stride = p.segments[0].stride;
  const T* x = static_cast<const T*>(p.x);

  allow_next_kernel();
  if (plan.cluster > 1) arrive_cluster();
  const RowRange range = row_range(p.k, rank, plan.cluster);
  int row = range.begin + warp * (kWarpSize / kLanes) + lane / kLanes;
  const T* weight = static_cast<const T*>(p.segments[0].weight) + column;

  const NormedX<T> normed(p, shared);
  typename C::Raw raw[kUnroll];
  T x_raw[kUnroll];
  const auto load = [&](int u, int from) {
    const int r = from + u * kRowsAtOnce;
    raw[u] = has_column && r < range.end ? C::load_streaming(weight + r * stride) : C::zero();
  };
  // x is asked for as far ahead as the weights: L1 answers in order, so a load issued late waits for all
  // weights before it.
  const auto load_x = [&](int u, int from) {
    const int r = from + u * kRowsAtOnce;
    if (kX > 1) return;
    if (r >= range.end) {
      x_raw[u] = from_float<T>(0.f);
    } else {
      x_raw[u] = normed.rows ? *normed.at(0, r) : Chunk<T, 1>::load_l2(x + r);
    }
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load(u, row);
  normed.load_parameters(p.norm);
  if (plan.append) find_slots(rope, p.m, slots);

  wait_for_previous_kernel();
  const auto addends = load_column_addends<T, kX, kColumns>(p, rank, first_column);
  normed.load(p);
  if (kX > 1) drop_l1();
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load_x(u, row);

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
        if (kX > 1) {
          const T* at = normed.rows ? normed.at(m, r) : x + m * p.k + r;
          x_raw[u] = r < range.end ? *at : from_float<T>(0.f);
        }
        const float xs = to_float(x_raw[u]);
#pragma unroll
        for (int e = 0; e < kElems; ++e) acc[m][e] = fmaf(w[e], xs, acc[m][e]);
      }
      load(u, row + kUnroll * kRowsAtOnce);
      load_x(u, row + kUnroll * kRowsAtOnce);
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
  merge_columns<T>(p, sums, addends, rope, slots, plan, rank, first_column);
  trace(TracePoint::kEnd);
}

template <class T, int kElems, int kX>
void launch(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  constexpr int kColumns = kLanesN<kElems> * kElems;
  const int column_blocks = (p.n + kColumns - 1) / kColumns;
  const int cluster = choose_cluster(p, column_blocks, kClusterLimit<kX, kColumns>);
  launch_columns_kernel<T>(gemv_columns_kernel<T, kElems, kX>, p, rope, column_blocks, cluster, stream);
}

template <class T, int kElems>
void launch_x_rows(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  if (p.m == 1) return launch<T, kElems, 1>(p, rope, stream);
  if (p.m <= 4) return launch<T, kElems, 4>(p, rope, stream);
  return launch<T, kElems, 16>(p, rope, stream);
}

}  // namespace

bool fits_gemv_columns(const GemvParams& p, const RopeAppendParams* rope) {
  if (!p.transposed || (rope && rope->rotary_dim > 0)) return false;
  if (p.norm.kind == NormKind::kNone) return true;
  if (p.norm.weight_offset != 0.f) return false;  // no model has such a norm in front of such weights
  return has_aligned_rows(p) && p.norm.weight && is_aligned16(p.norm.weight) && is_aligned16(p.norm.bias) &&
         (p.m + 2) * p.k * element_size(p.dtype) <= kMaxNormedBytes;
}

void launch_gemv_columns(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream) {
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (sizeof(T) == 4) {  // aligned 16-bit weights go to gemv_columns_mma.cu
      const GemvSegment& s = params.segments[0];
      if (is_aligned16(s.weight) && s.stride % kVecElems<T> == 0 && params.n % kVecElems<T> == 0) {
        return launch_x_rows<T, kVecElems<T>>(params, rope, stream);
      }
    }
    launch_x_rows<T, 1>(params, rope, stream);
  });
}

}  // namespace hf_fastpath
