// What: the products of x with the matrices of low rank of LoRA adapters, behind a norm of x.
// Work split: grid (ranks of all matrices, groups of up to four rows of x; or all rows that take the rank's
//   owner, one after the other). The threads of a block share one
//   row of a matrix, which is on its way, as are the norm's weights, while the kernel in front still runs;
//   their sums meet in shared memory. Every block norms x by itself: an RMS norm's factor is applied to the
//   sum. Layer norm reads x twice, because a mean that is not small would cancel in one pass.
// Traffic: ranks * inputs * sizeof(W), once for four rows; x and the norm's weights come out of L2 for every
//   block.
// Roofline: latency of one load of x behind the kernel in front: the matrices are a few hundred KB.

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/inverse_root.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "lora_down/lora_down.h"

namespace hf_fastpath {
namespace {

constexpr int kMinThreads = 128;
constexpr int kMaxThreads = 1024, kMaxWarps = kMaxThreads / kWarpSize;
// Accesses of each row that a thread has in flight: 16,384 inputs of one row in 16 bits are one window.
template <int kBatch>
constexpr int kTurns = kBatch == 1 ? 2 : 1;
constexpr int kMaxBatch = 4;     // rows of x a block: as many warps end the sums
constexpr int kLineBytes = 128;  // of L2
static_assert(kMaxBatch * kWarpSize <= kMinThreads, "a warp for each row");

// The matrix that row `rank` of all matrices lies in.
__device__ __forceinline__ int matrix_of(const LoraMatrices& matrices, int rank) {
  int found = 0;
#pragma unroll 1
  for (int m = 1; m < matrices.count; ++m) found += rank >= matrices.first_rank[m];
  return found;
}

// kElems: of x, an access.
template <class T, class W, int kElems, int kBatch>
__global__ void __launch_bounds__(kMaxThreads) lora_down_kernel(const __grid_constant__ LoraDownParams p) {
  using X = Chunk<T, kElems>;
  constexpr int kElemsOfWeight = kElems == 1 ? 1 : kVecElems<W>;
  constexpr int kParts = kElems / kElemsOfWeight;
  using C = Chunk<W, kElemsOfWeight>;
  __shared__ double dots[kBatch][kMaxWarps];
  __shared__ float squares[kBatch][kMaxWarps], shifts[kMaxWarps], means[kBatch][kMaxWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int inputs = p.inputs, own = threadIdx.x * kElems, turn = blockDim.x * kElems;
  const int m = matrix_of(p.matrices, blockIdx.x);
  const W* weight = static_cast<const W*>(p.matrices.each[m].data) +
                    (blockIdx.x - p.matrices.first_rank[m]) * p.matrices.each[m].row_stride;
  const T* norm_weight = static_cast<const T*>(p.norm_weight);
  const T* norm_bias = static_cast<const T*>(p.norm_bias);
  const bool is_layer = p.norm == NormKind::kLayer;
  const float offset = p.norm == NormKind::kRmsOffset ? 1.f : 0.f;
  int first_row = blockIdx.y * kBatch;
  const bool has_owner = kBatch == 1 && p.chosen != nullptr;
  const auto is_other = [&](int row) { return has_owner && p.chosen[row] != p.owner[m]; };
  // Goes on to the first row from `row` on that takes the matrix.
  const auto go_to = [&](int row) {
    while (row < p.rows && is_other(row)) ++row;
    first_row = row;
    return row < p.rows;
  };
  const auto x_at = [&](int b, int i) {
    return static_cast<const T*>(p.x) + int64_t(min(first_row + b, p.rows - 1)) * inputs + i;
  };

  typename C::Raw raw[kTurns<kBatch>][kParts];
  typename X::Raw factors[kTurns<kBatch>];
  const auto load = [&](int start) {
#pragma unroll
    for (int a = 0; a < kTurns<kBatch>; ++a) {
      const int i = start + a * turn + own;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        raw[a][part] = i < inputs ? C::load_streaming(weight + i + part * kElemsOfWeight) : C::zero();
      factors[a] = norm_weight && i < inputs ? X::load_shared_line(norm_weight + i) : X::zero();
    }
  };
  allow_next_kernel();
  const bool is_taken = !has_owner || go_to(0);
  if (is_taken) load(0);
  for (int64_t i = int64_t(kTurns<kBatch>) * turn + threadIdx.x * (kLineBytes / sizeof(W)); i < inputs;
       i += blockDim.x * (kLineBytes / sizeof(W)))
    prefetch_l2(weight + i);
  wait_for_previous_kernel();
  if (threadIdx.x < p.rows && is_other(threadIdx.x))
    p.out[int64_t(threadIdx.x) * p.matrices.ranks + blockIdx.x] = 0.f;
  if (!is_taken) return;

  bool is_first = true;
  do {
    if (!is_first) {
      __syncthreads();  // the row before this one has been summed up
      load(0);
    }
    is_first = false;
    float mean[kBatch] = {};
    if (is_layer) {
      float sums[kBatch] = {};
#pragma unroll 1
      for (int i = own; i < inputs; i += turn) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          float x[kElems];
          X::unpack(X::load_l2(x_at(b, i)), x);
#pragma unroll
          for (int e = 0; e < kElems; ++e) sums[b] += x[e];
        }
      }
      const float sum = warp_sums<kBatch>(sums, lane);
      if (lane % (kWarpSize / kBatch) == 0) means[lane / (kWarpSize / kBatch)][warp] = sum;
      __syncthreads();  // every warp's sums
#pragma unroll
      for (int b = 0; b < kBatch; ++b) mean[b] = warp_sum(lane < warps ? means[b][lane] : 0.f) / inputs;
    }

    float sums[kBatch] = {}, square_sums[kBatch] = {}, shift = 0.f;
#pragma unroll 1
    for (int start = 0; start < inputs; start += kTurns<kBatch> * turn) {
      if (start > 0) load(start);
      typename X::Raw x_raw[kBatch][kTurns<kBatch>];  // all on their way before the first is waited for
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
#pragma unroll
        for (int a = 0; a < kTurns<kBatch>; ++a) {
          const int i = start + a * turn + own;
          x_raw[b][a] = i < inputs ? X::load_l2(x_at(b, i)) : X::zero();
        }
#pragma unroll
      for (int a = 0; a < kTurns<kBatch>; ++a) {
        const int i = start + a * turn + own;
        const bool present = i < inputs;
        float w[kParts][kElemsOfWeight], scaled[kElems];
#pragma unroll
        for (int part = 0; part < kParts; ++part) C::unpack(raw[a][part], w[part]);
#pragma unroll
        for (int e = 0; e < kElems; ++e) scaled[e] = w[e / kElemsOfWeight][e % kElemsOfWeight];
        if (is_layer && norm_bias && present) {
          float bias[kElems];
          X::unpack(X::load_shared_line(norm_bias + i), bias);
#pragma unroll
          for (int e = 0; e < kElems; ++e) shift = fmaf(scaled[e], bias[e], shift);
        }
        if (norm_weight) {
          float factor[kElems];
          X::unpack(factors[a], factor);
#pragma unroll
          for (int e = 0; e < kElems; ++e) scaled[e] *= factor[e] + offset;
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const float center = present ? mean[b] : 0.f;  // what is absent is zero, and adds nothing
          float x[kElems];
          X::unpack(x_raw[b][a], x);
#pragma unroll
          for (int e = 0; e < kElems; ++e) {
            const float value = x[e] - center;
            sums[b] = fmaf(scaled[e], value, sums[b]);
            square_sums[b] = fmaf(value, value, square_sums[b]);
          }
        }
      }
    }

    double wide[kBatch];  // keeps every bit of a thread's sums
#pragma unroll
    for (int b = 0; b < kBatch; ++b) wide[b] = sums[b];
    const double dot = warp_sums<kBatch>(wide, lane);
    const float square_sum = warp_sums<kBatch>(square_sums, lane);
    shift = warp_sum(shift);
    if (lane % (kWarpSize / kBatch) == 0) {
      dots[lane / (kWarpSize / kBatch)][warp] = dot;
      squares[lane / (kWarpSize / kBatch)][warp] = square_sum;
    }
    if (lane == 0) shifts[warp] = shift;
    __syncthreads();  // every warp's sums
    const int row = first_row + warp;
    if (warp < kBatch && row < p.rows) {
      const bool present = lane < warps;
      double totals[1] = {present ? dots[warp][lane] : 0.0};
      double total = warp_sums<1>(totals, lane);
      if (p.norm != NormKind::kNone) {
        total *= inverse_root<T>(warp_sum(present ? squares[warp][lane] : 0.f) / inputs + p.norm_eps);
        total += warp_sum(present ? shifts[lane] : 0.f);
      }
      if (lane == 0) p.out[int64_t(row) * p.matrices.ranks + blockIdx.x] = static_cast<float>(total);
    }
  } while (has_owner && go_to(first_row + 1));
}

template <class T, class W, int kElems, int kBatch>
void launch(const LoraDownParams& p, cudaStream_t stream) {
  const int accesses = (p.inputs + kElems - 1) / kElems;
  int threads = (accesses + kTurns<kBatch> - 1) / kTurns<kBatch>;
  threads = (threads + kWarpSize - 1) / kWarpSize * kWarpSize;
  threads = min(kMaxThreads, max(kMinThreads, threads));
  const int groups = p.chosen ? 1 : (p.rows + kBatch - 1) / kBatch;
  const dim3 grid(p.matrices.ranks, groups), block(threads);
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(lora_down_kernel<T, W, kElems, kBatch>, grid, block, size_t(0),
                                             stream, p.programmatic_launch, p));
}

template <class T, class W>
void launch_of(const LoraDownParams& p, cudaStream_t stream) {
  constexpr int kElems = kVecElems<T>;
  const bool whole = p.inputs % kElems == 0 && has_whole_rows(p.matrices) && is_aligned16(p.x) &&
                     is_aligned16(p.norm_weight) && is_aligned16(p.norm_bias);
  if (p.rows == 1 || p.chosen)
    return whole ? launch<T, W, kElems, 1>(p, stream) : launch<T, W, 1, 1>(p, stream);
  return whole ? launch<T, W, kElems, kMaxBatch>(p, stream) : launch<T, W, 1, kMaxBatch>(p, stream);
}

}  // namespace

void launch_lora_down(const LoraDownParams& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    p.matrices.dtype == p.dtype ? launch_of<T, T>(p, stream) : launch_of<T, float>(p, stream);
  });
}

}  // namespace hf_fastpath
