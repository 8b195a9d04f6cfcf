// What: the chosen experts of a mixture for few x rows, of weights stored [in_features, features] with gate
//   and up features in turn or one after the other, with biases: the activations of every choice, then the
//   weighted sum of the products with down. Choices are read on the device.
// Work split: three kernels, 8 rows of x at a time. Gate and up, and down: blockIdx.y is a choice (row, k); a
//   block takes kColumns features of its expert, neighbors or half of them of gate and half of up, for every
//   row that chose it, and blocks of later choices of the same expert end at once. A lane owns 16 bytes of
//   kUnroll neighboring weight rows at a time and replaces each as it is used; lanes and warps with other
//   rows are summed in a fixed order. Down leaves float32 products of every choice, which the third kernel
//   weighs and adds, a thread an output: no atomics. Down and the third start early: what they read before
//   the kernel in front is complete are choices and first weights.
// Traffic: 3 * width * hidden_size * sizeof(T) once for each expert that any of 8 rows chose; x, the
//   activations and the products, rows * top_k * hidden_size * 4 bytes, come out of L2.
// Roofline: read bandwidth. bfloat16, gpt-oss-20b's 4 of 32 experts, 2880 to twice 2880: 59.7 us or 72 % of
//   4618 GB/s for one row, 442 us or 41 % for 8 (H200, 2026-11).

#include <type_traits>

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "fused_experts/fused_experts.h"
#include "fused_experts/fused_experts_device.cuh"

namespace hf_fastpath {
namespace {

constexpr int kUnroll = 8;  // weight rows a lane has in flight: 16 bytes of 16-bit x

// A block for kX rows. One row: whole lines of 128 bytes. More rows: sums fill the registers, so that blocks
// are small, of which gpt-oss has 180 and 90 a choice.
template <int kElems, int kX>
struct Shape {
  static constexpr int kWarps = kX == 1 ? 8 : 4, kThreads = kWarps * kWarpSize;
  // Lanes of a warp side by side; one element a lane wants all 32.
  static constexpr int kLanes = kElems == 1 ? kWarpSize : kX == 1 ? 8 : 4;
  static constexpr int kColumns = kLanes * kElems;  // features
  // Blocks an SM runs at once: registers for the sums of kX rows bound it.
  static constexpr int kMinBlocks = kX > 1 && kX <= 4 ? 4 : 3;
};
constexpr int kAddThreads = 128;

// Sums over in_features of x times a block's columns, in shared memory, by warp.
template <int kElems, int kX>
struct ColumnSums {
  float of_warp[Shape<kElems, kX>::kWarps][kX][Shape<kElems, kX>::kColumns];
  int source[kX];

  __device__ __forceinline__ float operator()(int m, int column) const {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < Shape<kElems, kX>::kWarps; ++w) sum += of_warp[w][m][column];
    return sum;
  }
};

// The first of the columns that a lane multiplies, -1 if there is none. Features are a multiple of kElems
// here.
template <int kElems, int kX>
__device__ __forceinline__ int neighboring_columns(int features) {
  const int column =
      blockIdx.x * Shape<kElems, kX>::kColumns + threadIdx.x % Shape<kElems, kX>::kLanes * kElems;
  return column < features ? column : -1;
}

// The same where half of the block's columns are of gate, and half are of up, `width` further on.
template <int kElems, int kX>
__device__ __forceinline__ int gate_and_up_columns(int width) {
  constexpr int kHalf = Shape<kElems, kX>::kColumns / 2;
  const int place = threadIdx.x % Shape<kElems, kX>::kLanes * kElems,
            column = blockIdx.x * kHalf + place % kHalf;
  return column < width ? column + (place < kHalf ? 0 : width) : -1;
}

// x: row m of the block starts at x_row(m); it is there once the kernel in front is complete, if kWaits.
// column: of this lane, see neighboring_columns. Returns after a barrier.
template <class T, int kElems, int kX, bool kWaits, class XRow>
__device__ __forceinline__ void sum_columns(const ExpertStack& stack, const ExpertWork<kX>& work,
                                            int in_features, int column, const XRow& x_row,
                                            ColumnSums<kElems, kX>& sums) {
  using C = Chunk<T, kElems>;
  using X = Chunk<T, kVecElems<T>>;
  constexpr int kSide = Shape<kElems, kX>::kLanes, kSlots = Shape<kElems, kX>::kThreads / kSide,
                kStep = kSlots * kUnroll;
  constexpr int kXChunks = kUnroll / kVecElems<T>;  // 16-byte pieces of one x row's kUnroll elements
  constexpr bool kPiecesOfX = kX == 1 && kElems > 1;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool has_column = column >= 0;
  int row = (threadIdx.x / kSide) * kUnroll;  // of this lane's next products
  typename C::Raw raw[kUnroll];
  typename X::Raw x_raw[kPiecesOfX ? kXChunks : 1];
  // The next weights to ask for; walked row by row, which takes fewer registers than kUnroll addresses.
  const T* next = stack_row<T>(stack, work.expert, row) + column;
  int next_row = row;
  const auto load = [&](int u) {
    raw[u] = has_column && next_row < in_features ? C::load_once(next) : C::zero();
    const int rows = u == kUnroll - 1 ? kStep - kUnroll + 1 : 1;
    next += rows * stack.row_stride, next_row += rows;
  };
  // x is asked for as far ahead as the weights: L1 answers in order. in_features are a multiple of kUnroll
  // here.
  const auto load_x = [&](int row) {
    if constexpr (kPiecesOfX) {
#pragma unroll
      for (int i = 0; i < kXChunks; ++i)
        x_raw[i] = row < in_features ? X::load(x_row(0) + row + i * kVecElems<T>) : X::zero();
    }
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load(u);
  if (kWaits) wait_for_previous_kernel();
  drop_l1();  // x comes through L1
  load_x(row);

  float acc[kX][kElems] = {};
#pragma unroll 1
  for (int base = 0; base < in_features; base += kStep, row += kStep) {
    float pieces[kUnroll];
    if constexpr (kPiecesOfX) {
#pragma unroll
      for (int i = 0; i < kXChunks; ++i) {
        float piece[kVecElems<T>];
        X::unpack(x_raw[i], piece);
#pragma unroll
        for (int e = 0; e < kVecElems<T>; ++e) pieces[i * kVecElems<T> + e] = piece[e];
      }
      load_x(row + kStep);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float w[kElems];
      C::unpack(raw[u], w);
#pragma unroll
      for (int m = 0; m < kX; ++m) {
        if (kX > 1 && work.source[m] < 0) continue;  // the same in all lanes
        float x;
        if constexpr (kPiecesOfX) {
          x = pieces[u];
        } else {
          x = row + u < in_features ? to_float(x_row(m)[row + u]) : 0.f;
        }
#pragma unroll
        for (int e = 0; e < kElems; ++e) acc[m][e] = fmaf(w[e], x, acc[m][e]);
      }
      load(u);
    }
  }

  // Lanes with the same columns.
#pragma unroll
  for (int m = 0; m < kX; ++m) {
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
#pragma unroll
      for (int offset = kSide; offset < kWarpSize; offset *= 2)
        acc[m][e] += __shfl_xor_sync(kAllLanes, acc[m][e], offset);
      if (lane < kSide) sums.of_warp[warp][m][lane * kElems + e] = acc[m][e];
    }
    if (threadIdx.x == 0) sums.source[m] = work.source[m];
  }
  __syncthreads();  // every warp's sums, and the sources
}

// gate * sigmoid(alpha * gate) * (up + 1), both clamped; NaN stays NaN.
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float alpha, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return times_sigmoid<true>(gate, alpha * gate) * (up + 1.f);
}

template <class T>
__device__ __forceinline__ float bias_of(const void* bias, int64_t i) {
  return bias ? to_float(__ldg(static_cast<const T*>(bias) + i)) : 0.f;
}

template <class T, int kElems, int kX>
__global__ void __launch_bounds__(Shape<kElems, kX>::kThreads, Shape<kElems, kX>::kMinBlocks)
    gate_up_columns_kernel(FusedExpertsParams p) {
  constexpr int kPairs = Shape<kElems, kX>::kColumns / 2;
  __shared__ ColumnSums<kElems, kX> sums;
  // The next kernels read choices before they wait: they may only start once the one that made them is
  // complete.
  wait_and_allow_next_kernel();
  const ExpertWork<kX> work = find_work<kX>(p, threadIdx.x % kWarpSize);
  if (!work.is_some) return;
  const auto x_row = [&](int m) {
    return static_cast<const T*>(p.x) + int64_t(work.first_row + m) * p.hidden_size;
  };
  const int column = p.concatenated ? gate_and_up_columns<kElems, kX>(p.width)
                                    : neighboring_columns<kElems, kX>(2 * p.width);
  sum_columns<T, kElems, kX, false>(p.gate_up, work, p.hidden_size, column, x_row, sums);
  for (int i = threadIdx.x; i < kX * kPairs; i += Shape<kElems, kX>::kThreads) {
    const int m = i / kPairs, pair = i % kPairs, feature = blockIdx.x * kPairs + pair;
    if (sums.source[m] < 0 || feature >= p.width) continue;
    const int step = p.concatenated ? 1 : 2;
    const int64_t at = work.expert * p.width * 2 + step * feature;
    const float gate = sums(m, step * pair) + bias_of<T>(p.gate_up_bias, at);
    const float up = sums(m, step * pair + (p.concatenated ? kPairs : 1)) +
                     bias_of<T>(p.gate_up_bias, at + (p.concatenated ? p.width : 1));
    const float value =
        p.clamped ? clamped_swiglu(gate, up, p.alpha, p.limit) : activate(gate, p.activation) * up;
    T* hidden = static_cast<T*>(p.hidden);
    hidden[(int64_t(work.first_row + m) * p.top_k + sums.source[m]) * p.width + feature] =
        from_float<T>(value);
  }
}

template <class T, int kElems, int kX>
__global__ void __launch_bounds__(Shape<kElems, kX>::kThreads, Shape<kElems, kX>::kMinBlocks)
    down_columns_kernel(FusedExpertsParams p) {
  __shared__ ColumnSums<kElems, kX> sums;
  allow_next_kernel();
  const ExpertWork<kX> work = find_work<kX>(p, threadIdx.x % kWarpSize);
  if (!work.is_some) return;
  const auto x_row = [&](int m) {
    const int64_t pair = int64_t(work.first_row + m) * p.top_k + work.source[m];
    return static_cast<const T*>(p.hidden) + pair * p.width;
  };
  const int column = neighboring_columns<kElems, kX>(p.hidden_size);
  sum_columns<T, kElems, kX, true>(p.down, work, p.width, column, x_row, sums);
  for (int i = threadIdx.x; i < kX * Shape<kElems, kX>::kColumns; i += Shape<kElems, kX>::kThreads) {
    const int m = i / Shape<kElems, kX>::kColumns, place = i % Shape<kElems, kX>::kColumns;
    const int output = blockIdx.x * Shape<kElems, kX>::kColumns + place;
    if (sums.source[m] < 0 || output >= p.hidden_size) continue;
    const int64_t pair = int64_t(work.first_row + m) * p.top_k + sums.source[m];
    p.products[pair * p.hidden_size + output] = sums(m, place);
  }
}

// blockIdx.y: row of x.
template <class T>
__global__ void __launch_bounds__(kAddThreads) add_choices_kernel(FusedExpertsParams p) {
  __shared__ int64_t experts[kMaxTopK];
  __shared__ float weights[kMaxTopK];
  const int m = blockIdx.y, output = blockIdx.x * kAddThreads + threadIdx.x;
  allow_next_kernel();
  if (threadIdx.x < p.top_k) {
    experts[threadIdx.x] = choice(p, m, threadIdx.x);
    weights[threadIdx.x] = __ldcg(p.expert_weights + m * p.top_k + threadIdx.x);
  }
  __syncthreads();  // the row's choices
  wait_for_previous_kernel();
  if (output >= p.hidden_size) return;
  // float32 results keep what the additions of up to 32 choices would round off.
  std::conditional_t<sizeof(T) == 4, double, float> sum = 0;
  for (int k = 0; k < p.top_k; ++k) {
    if (experts[k] < 0) continue;
    int source = k;  // the product of an expert that was chosen twice lies where it was chosen first
    for (int other = k - 1; other >= 0; --other) source = experts[other] == experts[k] ? other : source;
    const float product = __ldcg(p.products + (int64_t(m) * p.top_k + source) * p.hidden_size + output);
    sum +=
        decltype(sum)(weights[k]) * (product + bias_of<T>(p.down_bias, experts[k] * p.hidden_size + output));
  }
  const int64_t place = int64_t(m) * p.hidden_size + output;
  if (p.residual) sum += to_float(Chunk<T, 1>::load_l2(static_cast<const T*>(p.residual) + place));
  static_cast<T*>(p.out)[place] = from_float<T>(static_cast<float>(sum));
}

template <class T, int kElems, int kX>
void launch_variant(const FusedExpertsParams& p, cudaStream_t stream) {
  using S = Shape<kElems, kX>;
  const dim3 grid = expert_grid(p, 2 * p.width, S::kColumns), block(S::kThreads);
  const dim3 down_grid = expert_grid(p, p.hidden_size, S::kColumns);
  const dim3 add_grid((p.hidden_size + kAddThreads - 1) / kAddThreads, p.rows), add_block(kAddThreads);
  const size_t smem_bytes = 0;
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(gate_up_columns_kernel<T, kElems, kX>, grid, block, smem_bytes,
                                             stream, p.programmatic_launch, p));
  // The kernels in front are our own: they write nothing that is read early.
  HF_FASTPATH_CUDA_CHECK(
      launch_programmatic(down_columns_kernel<T, kElems, kX>, down_grid, block, smem_bytes, stream, true, p));
  HF_FASTPATH_CUDA_CHECK(
      launch_programmatic(add_choices_kernel<T>, add_grid, add_block, smem_bytes, stream, true, p));
}

template <class T, int kElems>
void launch_rows(const FusedExpertsParams& p, cudaStream_t stream) {
  if (p.rows == 1) return launch_variant<T, kElems, 1>(p, stream);
  if constexpr (kElems > 1) {  // else alignment costs more than rows that are not there
    if (p.rows <= 4) return launch_variant<T, kElems, 4>(p, stream);
  }
  return launch_variant<T, kElems, kMaxX>(p, stream);
}

}  // namespace

void launch_fused_experts_columns(const FusedExpertsParams& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kElems = kVecElems<T>;
    const bool aligned = is_aligned(p.gate_up, 2 * p.width, kElems) && p.hidden_size % kUnroll == 0 &&
                         is_aligned(p.down, p.hidden_size, kElems) && p.width % kUnroll == 0 &&
                         is_aligned16(p.x) && is_aligned16(p.hidden);
    return aligned ? launch_rows<T, kElems>(p, stream) : launch_rows<T, 1>(p, stream);
  });
}

}  // namespace hf_fastpath
