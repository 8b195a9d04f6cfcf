// What: a base product plus what LoRA adapters add to it, then activation, gate and residual.
// Work split: grid (blocks of features of out, groups of up to four rows; or rows, if each takes matrices of
//   its own). A group of 1 to 32 lanes, as many
//   as the rows of the matrices have accesses, takes one feature of out, or both that a gate multiplies. Its
//   first accesses of matrices are on their way while the kernel in front still runs. Rows of hidden lie in
//   shared memory, because every feature reads them.
// Traffic: the matrices, once for four rows; base, residual and out once; hidden out of L2 for every block.
// Roofline: latency of one load of hidden and base behind the kernel in front; the matrices are a few hundred
//   KB, or, for wide projections and high ranks, as many MB as take longer than that.

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "lora_up/lora_up.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;
// Blocks an SM: registers that let blocks start beside other kernels'. Several rows take a few more.
template <int kBatch>
constexpr int kMinBlocks = kBatch == 1 ? 4 : 3;
constexpr int kAhead = 4;     // accesses of a thread in flight before the wait, of both features of a gate
constexpr int kMaxBatch = 4;  // rows a block: 32 KB of hidden at most
// Threads that an SM runs at once, about: a call of more gives each more to do.
constexpr int kThreadsOfSm = 4 * kThreads;

// A lane's accesses of all matrices that reach one feature, one after the other.
template <class W, int kElems>
struct Walk {
  int feature, lane, lanes;
  bool has_owner;  // walks the matrices of `owner` alone
  int owner;
  int matrix = -1, i = 0, end = 0;
  const W* row = nullptr;

  // Goes on to the next access; false behind the last one.
  __device__ __forceinline__ bool next(const LoraUpParams& p) {
    i += lanes * kElems;
    while (i >= end) {
      if (++matrix >= p.matrices.count) return false;
      if (has_owner && p.owner[matrix] != owner) continue;
      const LoraMatrix& of = p.matrices.each[matrix];
      const int at = feature - p.first_feature[matrix];
      const bool reaches = at >= 0 && at < of.rows;
      row = static_cast<const W*>(of.data) + (reaches ? at * of.row_stride : 0);
      i = lane * kElems, end = reaches ? of.columns : 0;
    }
    return true;
  }
};

// kElems: of a matrix, an access.
template <class T, class W, int kElems, int kBatch, bool kGated>
__global__ void __launch_bounds__(kThreads, kMinBlocks<kBatch>)
    lora_up_kernel(const __grid_constant__ LoraUpParams p, int lane_bits) {
  using C = Chunk<W, kElems>;
  using One = Chunk<T, 1>;
  constexpr int kParts = kGated ? 2 : 1, kTurns = kAhead / kParts;
  extern __shared__ __align__(16) float hidden[];  // [rows of this block, ranks]
  const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1);
  const int output = (blockIdx.x * kThreads + threadIdx.x) >> lane_bits;
  const int ranks = p.matrices.ranks, first_row = blockIdx.y * kBatch;
  const int rows = min(kBatch, p.rows - first_row);
  const bool present = output < p.outputs;

  Walk<W, kElems> walks[kParts];
  typename C::Raw raw[kParts][kTurns];
  int places[kParts][kTurns];  // of what an access is multiplied with in a row of hidden; -1: there is none
  float scales[kParts][kTurns];
  allow_next_kernel();
  const bool has_owner = kBatch == 1 && p.chosen != nullptr;
  const int own = has_owner ? p.chosen[first_row] : 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    auto& walk = walks[part];
    walk.feature = present ? output + part * p.outputs : -1;  // no matrix reaches feature -1
    walk.lane = lane, walk.lanes = lanes, walk.has_owner = has_owner, walk.owner = own;
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      places[part][t] = -1, raw[part][t] = C::zero(), scales[part][t] = 0.f;
      if (!walk.next(p)) continue;
      raw[part][t] = C::load_streaming(walk.row + walk.i);
      places[part][t] = p.matrices.first_rank[walk.matrix] + walk.i;
      scales[part][t] = p.scale[walk.matrix];
    }
  }
  wait_for_previous_kernel();

  // The lanes of a group share its rows out.
  const auto is_mine = [&](int b) { return present && b < rows && (b & (lanes - 1)) == lane; };
  typename One::Raw base[kParts][kBatch], residual[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    residual[b] = One::zero();
    const int64_t row = first_row + b;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      base[part][b] =
          is_mine(b)
              ? One::load_l2(static_cast<const T*>(p.base) + row * p.features + output + part * p.outputs)
              : One::zero();
    if (!kGated && p.residual && is_mine(b))
      residual[b] = One::load_l2(static_cast<const T*>(p.residual) + row * p.outputs + output);
  }
  for (int i = threadIdx.x; i < rows * ranks; i += kThreads)
    hidden[i] = __ldcg(p.hidden + int64_t(first_row) * ranks + i);
  __syncthreads();  // hidden is there

  float sums[kParts][kBatch] = {};
  const auto add = [&](int part, const typename C::Raw& from, int place, float scale) {
    float w[kElems];
    C::unpack(from, w);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b >= rows) break;
      const float* h = hidden + b * ranks + place;
      float product = 0.f;
      if constexpr (kElems == 1) {
        product = w[0] * h[0];
      } else {
#pragma unroll
        for (int e = 0; e < kElems; e += 4) {
          const float4 four = *reinterpret_cast<const float4*>(h + e);
          product = fmaf(w[e], four.x, product), product = fmaf(w[e + 1], four.y, product);
          product = fmaf(w[e + 2], four.z, product), product = fmaf(w[e + 3], four.w, product);
        }
      }
      sums[part][b] = fmaf(scale, product, sums[part][b]);
    }
  };
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
      if (places[part][t] >= 0) add(part, raw[part][t], places[part][t], scales[part][t]);
    auto& walk = walks[part];
    while (walk.next(p))
      add(part, C::load_streaming(walk.row + walk.i), p.matrices.first_rank[walk.matrix] + walk.i,
          p.scale[walk.matrix]);
  }
  for (int step = lanes / 2; step > 0; step /= 2)
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int b = 0; b < kBatch; ++b) sums[part][b] += __shfl_xor_sync(kAllLanes, sums[part][b], step);

#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    if (!is_mine(b)) continue;
    float y = activate(to_float(base[0][b]) + sums[0][b], p.activation);
    if constexpr (kGated) y *= to_float(base[kParts - 1][b]) + sums[kParts - 1][b];
    y += to_float(residual[b]);
    static_cast<T*>(p.out)[int64_t(first_row + b) * p.outputs + output] = from_float<T>(y);
  }
}

// Bits of the number of lanes a feature: as many as a row has accesses, and fewer with more accesses each
// where there are more threads than run at once.
template <int kElems>
int lane_bits_of(const LoraUpParams& p, int groups_of_rows) {
  int columns = 1;
  for (int m = 0; m < p.matrices.count; ++m) columns = max(columns, p.matrices.each[m].columns);
  const int accesses = (columns + kElems - 1) / kElems, turns = p.gated ? kAhead / 2 : kAhead;
  int bits = 0;
  while (bits < log2_of(kWarpSize) && (1 << bits) < accesses) ++bits;
  const int64_t most = int64_t(multiprocessor_count()) * kThreadsOfSm;
  while (bits > 0 && (int64_t(p.outputs) * groups_of_rows << bits) > most && accesses <= turns << (bits - 1))
    --bits;
  return bits;
}

template <class T, class W, int kElems, int kBatch, bool kGated>
void launch(const LoraUpParams& p, cudaStream_t stream) {
  const int groups_of_rows = (p.rows + kBatch - 1) / kBatch, bits = lane_bits_of<kElems>(p, groups_of_rows);
  const int64_t threads = int64_t(p.outputs) << bits;
  const dim3 grid(static_cast<unsigned>((threads + kThreads - 1) / kThreads), groups_of_rows),
      block(kThreads);
  const size_t smem_bytes = sizeof(float) * min(kBatch, p.rows) * p.matrices.ranks;
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(lora_up_kernel<T, W, kElems, kBatch, kGated>, grid, block,
                                             smem_bytes, stream, p.programmatic_launch, p, bits));
}

template <class T, class W, int kElems>
void launch_rows(const LoraUpParams& p, cudaStream_t stream) {
  if (p.rows == 1 || p.chosen)
    return p.gated ? launch<T, W, kElems, 1, true>(p, stream) : launch<T, W, kElems, 1, false>(p, stream);
  return p.gated ? launch<T, W, kElems, kMaxBatch, true>(p, stream)
                 : launch<T, W, kElems, kMaxBatch, false>(p, stream);
}

template <class T, class W>
void launch_of(const LoraUpParams& p, cudaStream_t stream) {
  return has_whole_rows(p.matrices) ? launch_rows<T, W, kVecElems<W>>(p, stream)
                                    : launch_rows<T, W, 1>(p, stream);
}

}  // namespace

void launch_lora_up(const LoraUpParams& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    p.matrices.dtype == p.dtype ? launch_of<T, T>(p, stream) : launch_of<T, float>(p, stream);
  });
}

}  // namespace hf_fastpath
