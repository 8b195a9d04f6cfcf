// What rms_norm and layer_norm share: a row of x held in the registers of one block between its statistics
// and its output, so that x is read once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"

namespace hf_fastpath {

// x and out: [rows, columns] contiguous. weight and bias: [columns] or null (1 and 0). residual, like x or
// null, is added to what was rounded; factor, [1] or null, multiplies what was rounded then.
template <class T>
struct NormParams {
  using Element = T;
  const T* x;
  const T* weight;
  const T* bias;
  const T* residual;
  T* out;
  int64_t rows;
  int columns;
  float eps;
  float weight_offset;       // of rms_norm: the factor is this + weight
  bool programmatic_launch;  // of rms_norm: the weight may be read before the kernel in front is complete
  const T* factor;           // of rms_norm
};

// Chunks a thread keeps: 8 elements each in half precision, so 1024 threads hold rows of 32768 elements.
constexpr int kMaxNormChunks = 4;
constexpr int kMaxNormThreads = 1024;
// Rows up to which a norm may be part of a decode step: only then it overlaps with the kernel in front. To
// drop L1 in each of many blocks would take longer than it saves.
constexpr int64_t kMaxOverlappingNormRows = 64;

template <class T>
__host__ __device__ bool uses_programmatic_launch(const NormParams<T>& p) {
  return p.rows <= kMaxOverlappingNormRows;
}

// Before the first load.
template <class T>
__device__ __forceinline__ void begin_norm(const NormParams<T>& p) {
  if (!uses_programmatic_launch(p)) return;
  allow_next_kernel();
  wait_for_previous_kernel();
  drop_l1();
}

// Elements [i, i + kElems) of this block's row.
template <class T, int kElems>
__device__ __forceinline__ void store_normed(const NormParams<T>& p, int i, float (&y)[kElems]) {
  using C = Chunk<T, kElems>;
  const int64_t at = blockIdx.x * int64_t(p.columns) + i;
  if (p.residual) {
    float more[kElems];
    C::unpack(C::load(p.residual + at), more);
#pragma unroll
    for (int e = 0; e < kElems; ++e) y[e] = to_float(from_float<T>(y[e])) + more[e];
  }
  if (p.factor) {
    const float factor = to_float(*p.factor);
#pragma unroll
    for (int e = 0; e < kElems; ++e) y[e] = to_float(from_float<T>(y[e])) * factor;
  }
  C::store(p.out + at, y);
}

// One row in registers: chunk c of thread t is chunk t + c * blockDim.x of the row; absent chunks hold zeros.
template <class T, int kElems, int kChunks>
struct Row {
  using C = Chunk<T, kElems>;
  float values[kChunks][kElems];

  __device__ __forceinline__ void load(const T* row, int columns) {
    typename C::Raw raw[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int i = (threadIdx.x + c * blockDim.x) * kElems;
      raw[c] = i < columns ? C::load(row + i) : C::zero();
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) C::unpack(raw[c], values[c]);
  }
};

// Launches `kernel` families by the number of chunks a thread keeps. `Launch::run<T, kElems, kChunks>(params,
// grid, block, stream)` starts one; kChunks = 0 is the variant that reads x again for each use, for rows that
// fit nowhere. `others_aligned`: so are the rows that only `Launch` knows of.
template <class Launch, class Params>
void launch_norm(const Params& p, cudaStream_t stream, bool others_aligned = true) {
  using T = typename Params::Element;
  if (p.rows == 0 || p.columns == 0) return;
  constexpr int kElems = kVecElems<T>;
  const bool aligned = others_aligned && p.columns % kElems == 0 && is_aligned16(p.x) &&
                       is_aligned16(p.out) && is_aligned16(p.weight) && is_aligned16(p.bias) &&
                       is_aligned16(p.residual);
  const int64_t chunks = aligned ? p.columns / kElems : p.columns;
  // Few rows: the widest block, for the shortest latency. Many: four chunks a thread, so that more rows are
  // resident and a row costs fewer barriers.
  const bool many_rows = p.rows >= 4 * int64_t(multiprocessor_count());
  const int64_t per_thread = many_rows ? kMaxNormChunks : 1;
  int64_t threads = (chunks + per_thread - 1) / per_thread;
  threads = (threads + kWarpSize - 1) / kWarpSize * kWarpSize;
  threads = threads < kMaxNormThreads ? threads : kMaxNormThreads;
  const int64_t need = (chunks + threads - 1) / threads;
  const dim3 grid(static_cast<unsigned>(p.rows)), block(static_cast<unsigned>(threads));
  auto start = [&](auto elems) {
    constexpr int kE = decltype(elems)::value;
    if (need <= 1) return Launch::template run<T, kE, 1>(p, grid, block, stream);
    if (need <= 2) return Launch::template run<T, kE, 2>(p, grid, block, stream);
    if (need <= kMaxNormChunks) return Launch::template run<T, kE, kMaxNormChunks>(p, grid, block, stream);
    return Launch::template run<T, kE, 0>(p, grid, block, stream);
  };
  if (aligned) {
    start(std::integral_constant<int, kElems>());
  } else {
    start(std::integral_constant<int, 1>());
  }
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace hf_fastpath
