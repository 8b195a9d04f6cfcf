// What: dot products of x rows with weight rows [n, k] on CUDA cores, with bias, activation and residual, or
//   the gated pair activation(x @ gate) * (x @ up).
// Work split: a warp takes kRows output features (of gate and up both when gated) and all x rows;
//   `warps_per_row` warps of a block share the features and split k, interleaved, so that k-long rows still
//   give enough warps. A lane keeps kLoads 16-byte loads of weights in flight over its rows and replaces each
//   as it is consumed. x comes through L1, which the weights bypass: every warp of an SM reads the same few
//   KB. A single x row is loaded as far ahead as the weights, because L1 answers in order and a load issued
//   late waits for all weights before it.
// Traffic: n * k * sizeof(T) (twice that when gated) once, plus x per SM out of L2.
// Roofline: read bandwidth. float16, one x row with bias: 92 % of it for 4096 to 32000, 81 % for 14336 to
//   4096, 66 % for 4096 to 4096; gated 92 % for 4096 to 14336 twice (H200, 2026-11).
#pragma once

#include <type_traits>

#include "common/cuda_check.cuh"
#include "gemv/gemv_device.cuh"

namespace hf_fastpath {

constexpr int kRowsWarps = 8;                         // warps a block
constexpr int kRowsThreads = kRowsWarps * kWarpSize;  // 4 blocks of 64 registers a thread fill an SM
// Blocks an SM should hold. Registers for one weight row and one x row allow four, more weight rows three,
// for which code before sm_90 needs a few registers too many.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocksForRows = 2;
#else
constexpr int kBlocksForRows = 3;
#endif
// More x rows than one need more sums.
template <int kX, int kWeightRows>
constexpr int kRowsMinBlocks = kX > 4            ? 1
                               : kX > 1          ? 2
                               : kWeightRows > 1 ? kBlocksForRows
                                                 : 4;
constexpr int kMaxSumsPerWarp = 64;  // kRows * (gate and up) * x rows

// kElems: elements a load. kX: x rows kept, at least p.m. kRows: output features a warp. kLoads: weight loads
// in flight a lane.
template <class T, int kElems, int kX, int kRows, bool kGated, int kLoads>
__global__ void __launch_bounds__(kRowsThreads, kRowsMinBlocks<kX, kRows*(kGated ? 2 : 1)>)
    gemv_rows_kernel(GemvParams p, int warps_per_row) {
  using C = Chunk<T, kElems>;
  constexpr int kParts = kGated ? 2 : 1;
  constexpr int kWeightRows = kRows * kParts;
  constexpr int kUnroll = kLoads / kWeightRows < 1 ? 1 : kLoads / kWeightRows;
  constexpr int kSums = kWeightRows * kX;
  constexpr int kOutputs = kRows * kX;  // outputs a group of warps produces
  constexpr int kOutputsPerLane = (kOutputs + kWarpSize - 1) / kWarpSize;
  static_assert(kSums <= kMaxSumsPerWarp, "too many sums for the shared buffer");
  __shared__ float sums[kRowsWarps][kSums];

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int part_of_k = warp % warps_per_row;
  const int first_row = (blockIdx.x * (kRowsWarps / warps_per_row) + warp / warps_per_row) * kRows;
  const T* x = static_cast<const T*>(p.x);

  const T* weight[kWeightRows];
#pragma unroll
  for (int r = 0; r < kWeightRows; ++r) {
    const int n = min(first_row + r % kRows, p.n - 1);  // past the end: read a real row, write nothing
    weight[r] = weight_row<T, kGated>(p, n, r / kRows);
  }

  const int chunks = static_cast<int>(p.k / kElems);
  int base = part_of_k * kUnroll * kWarpSize;  // first chunk of this warp's step, without the lane
  const int step = warps_per_row * kUnroll * kWarpSize;
  typename C::Raw raw[kUnroll][kWeightRows], x_raw[kUnroll];
  const auto load = [&](int u, int from) {
    const int chunk = from + u * kWarpSize + lane;
#pragma unroll
    for (int r = 0; r < kWeightRows; ++r) {
      raw[u][r] = chunk < chunks ? C::load_streaming(weight[r] + int64_t(chunk) * kElems) : C::zero();
    }
    if (kX == 1) x_raw[u] = chunk < chunks ? C::load_shared_line(x + int64_t(chunk) * kElems) : C::zero();
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load(u, base);

  // The rows of a warp are neighbors: one line holds what is added to all of them.
  if (!kGated && part_of_k == 0 && lane < p.m && first_row < p.n) prefetch_addends<T>(p, lane, first_row);

  float acc[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) acc[i] = 0.f;
#pragma unroll 1
  for (; base < chunks; base += step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int chunk = base + u * kWarpSize + lane;
      float w[kWeightRows][kElems];
#pragma unroll
      for (int r = 0; r < kWeightRows; ++r) C::unpack(raw[u][r], w[r]);
#pragma unroll
      for (int m = 0; m < kX; ++m) {
        if (kX > 1 && m >= p.m) break;
        float xs[kElems];
        if (kX > 1)
          x_raw[u] = chunk < chunks ? C::load_readonly(x + m * p.k + int64_t(chunk) * kElems) : C::zero();
        C::unpack(x_raw[u], xs);
#pragma unroll
        for (int r = 0; r < kWeightRows; ++r)
#pragma unroll
          for (int e = 0; e < kElems; ++e) acc[r * kX + m] = fmaf(w[r][e], xs[e], acc[r * kX + m]);
      }
      load(u, base + step);
    }
  }

  Addends<T> addends[kOutputsPerLane];
  if (!kGated && part_of_k == 0) {
#pragma unroll
    for (int i = 0; i < kOutputsPerLane; ++i) {
      const int output = lane + i * kWarpSize, m = output % kX;
      const int n = first_row + output / kX;
      if (output < kOutputs && m < p.m && n < p.n) addends[i] = load_addends<T>(p, m, n);
    }
  }

  // Every lane's part of every sum goes to one place in shared memory, in an order that never changes.
  constexpr int kAtOnce = kSums < kWarpSize ? kSums : kWarpSize;
#pragma unroll
  for (int first = 0; first < kSums; first += kAtOnce) {
    // float32 results keep every bit of a lane's sum: the roundings of five float additions would show in
    // them.
    std::conditional_t<sizeof(T) == 4, double, float> some[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) some[i] = acc[first + i];
    const float sum = static_cast<float>(warp_sums<kAtOnce>(some, lane));
    if (lane % (kWarpSize / kAtOnce) == 0) sums[warp][first + lane / (kWarpSize / kAtOnce)] = sum;
  }
  if (warps_per_row > 1) {
    __syncthreads();  // the sums of the group's other warps
  } else {
    __syncwarp();  // the sums of this warp's other lanes
  }
  if (part_of_k != 0) return;
#pragma unroll
  for (int i = 0; i < kOutputsPerLane; ++i) {
    const int output = lane + i * kWarpSize, m = output % kX;
    const int n = first_row + output / kX;
    if (output >= kOutputs || m >= p.m || n >= p.n) continue;
    float dot = 0.f, up = 0.f;
#pragma unroll  // all loads at once; a missing warp adds nothing
    for (int w = 0; w < kRowsWarps; ++w) {
      if (w < warps_per_row) {
        dot += sums[warp + w][output];
        if (kGated) up += sums[warp + w][(kParts - 1) * kOutputs + output];
      }
    }
    if (kGated) {
      finish_gated<T>(p, m, n, dot, up);
    } else {
      finish<T>(p, m, n, dot, addends[i]);
    }
  }
}

template <class T, int kElems, int kX, int kRows, bool kGated, int kLoads>
void launch_rows_kernel(const GemvParams& p, int warps_per_row, cudaStream_t stream) {
  const int groups = (p.n + kRows - 1) / kRows;
  const int groups_per_block = kRowsWarps / warps_per_row;
  const dim3 grid((groups + groups_per_block - 1) / groups_per_block), block(kRowsThreads);
  const size_t smem_bytes = 0;
  gemv_rows_kernel<T, kElems, kX, kRows, kGated, kLoads>
      <<<grid, block, smem_bytes, stream>>>(p, warps_per_row);
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace hf_fastpath
