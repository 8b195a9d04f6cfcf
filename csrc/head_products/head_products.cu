// What: the product of each head's inputs with the head's own matrix, summed in float32, rounded once.
// Work split: grid (pieces of outputs, heads, groups of up to four rows). If matrices have rows of inputs, a
//   warp takes two outputs, and its lanes take the inputs. If matrices have rows of outputs, eight threads
//   take a row of 64 outputs, where accesses are whole, and 32 rows of inputs go on at once; their sums meet
//   in shared memory. The first weights of a thread are on their way while the kernel in front still runs;
//   the inputs come through shared memory.
// Traffic: heads * inputs * outputs * sizeof(T), once for four rows.
// Roofline: memory bandwidth; a few microseconds for the 2 MB of a layer of DeepSeek-V2-Lite.

#include "common/async.cuh"
#include "common/heads.cuh"
#include "common/warp.cuh"
#include "head_products/head_products.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kOutputs = 2;                      // of a warp, of rows of inputs
constexpr int kAcross = 8;                       // threads along a row of outputs
constexpr int kRowsAtOnce = kThreads / kAcross;  // of inputs
constexpr int kAhead = 4;                        // accesses of a thread in flight, for each output or row

// The inputs of this block's head for kBatch rows from `first_row` on, [kBatch, inputs]; zeros beyond the
// last row.
template <class T, int kBatch>
__device__ __forceinline__ void load_inputs(const HeadProductsParams& p, int head, int64_t first_row,
                                            float* inputs) {
  const int count = static_cast<int>(p.inputs);
  for (int i = threadIdx.x; i < kBatch * count; i += kThreads) {
    const int64_t row = first_row + i / count;
    inputs[i] = row < p.batch ? load_float_l2(head_of<T>(p.x, row, head) + i % count) : 0.f;
  }
  __syncthreads();  // the inputs
}

// kElems neighbors in shared memory, from a multiple of kElems on: by fours, which share banks in pairs
// alone.
template <int kElems>
__device__ __forceinline__ void load_floats(const float* from, float (&x)[kElems]) {
  if constexpr (kElems == 1) {
    x[0] = *from;
  } else {
#pragma unroll
    for (int e = 0; e < kElems; e += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + e);
      x[e] = four.x, x[e + 1] = four.y, x[e + 2] = four.z, x[e + 3] = four.w;
    }
  }
}

template <class T>
__device__ __forceinline__ void store_output(const HeadProductsParams& p, int64_t row, int head, int output,
                                             float sum) {
  if (row < p.batch) static_cast<T*>(p.out)[(row * p.heads + head) * p.outputs + output] = from_float<T>(sum);
}

template <class T, int kElems, int kBatch>
__global__ void __launch_bounds__(kThreads, 2) rows_of_inputs_kernel(HeadProductsParams p) {
  using C = Chunk<T, kElems>;
  extern __shared__ __align__(16) float inputs[];
  constexpr int kStep = kWarpSize * kElems;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize,
            count = static_cast<int>(p.inputs);
  const int head = blockIdx.y, first = (blockIdx.x * kWarps + warp) * kOutputs;
  const int64_t first_row = int64_t(blockIdx.z) * kBatch;
  const T* weight = static_cast<const T*>(p.weight) + head * p.weight_head_stride;
  typename C::Raw raw[kOutputs][kAhead];
  const auto load = [&](int start) {
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      const int output = min(first + o, static_cast<int>(p.outputs) - 1);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = start + a * kStep + lane * kElems;
        raw[o][a] = i < count ? C::load_once(weight + output * p.weight_row_stride + i) : C::zero();
      }
    }
  };
  allow_next_kernel();
  load(0);
  wait_for_previous_kernel();
  load_inputs<T, kBatch>(p, head, first_row, inputs);

  float sums[kOutputs][kBatch] = {};
#pragma unroll 1
  for (int start = 0; start < count; start += kAhead * kStep) {
    if (start > 0) load(start);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int i = start + a * kStep + lane * kElems;
      if (i >= count) break;
      float values[kOutputs][kElems];
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) C::unpack(raw[o][a], values[o]);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        float x[kElems];
        load_floats(inputs + b * count + i, x);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
          for (int e = 0; e < kElems; ++e) sums[o][b] = fmaf(values[o][e], x[e], sums[o][b]);
        }
      }
    }
  }
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const float sum = warp_sum(sums[o][b]);
      if (lane == 0 && first + o < p.outputs) store_output<T>(p, first_row + b, head, first + o, sum);
    }
  }
}

template <class T, int kElems, int kBatch>
__global__ void __launch_bounds__(kThreads) rows_of_outputs_kernel(HeadProductsParams p) {
  using C = Chunk<T, kElems>;
  constexpr int kColumns = kAcross * kElems;
  extern __shared__ __align__(16) float inputs[];
  __shared__ float sums_of[kWarps][kBatch][kColumns];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize,
            count = static_cast<int>(p.inputs);
  const int outputs = static_cast<int>(p.outputs), head = blockIdx.y;
  const int place = threadIdx.x % kAcross * kElems, column = blockIdx.x * kColumns + place;
  const int own = threadIdx.x / kAcross;
  const int64_t first_row = int64_t(blockIdx.z) * kBatch;
  const T* weight =
      static_cast<const T*>(p.weight) + head * p.weight_head_stride + min(column, outputs - kElems);
  typename C::Raw raw[kAhead];
  const auto load = [&](int start) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int i = start + a * kRowsAtOnce + own;
      raw[a] = i < count ? C::load_once(weight + i * p.weight_row_stride) : C::zero();
    }
  };
  allow_next_kernel();
  load(0);
  wait_for_previous_kernel();
  load_inputs<T, kBatch>(p, head, first_row, inputs);

  float sums[kBatch][kElems] = {};
#pragma unroll 1
  for (int start = 0; start < count; start += kAhead * kRowsAtOnce) {
    if (start > 0) load(start);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int i = start + a * kRowsAtOnce + own;
      if (i >= count) break;
      float values[kElems];
      C::unpack(raw[a], values);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int e = 0; e < kElems; ++e) sums[b][e] = fmaf(values[e], inputs[b * count + i], sums[b][e]);
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
#pragma unroll
      for (int offset = kAcross; offset < kWarpSize; offset *= 2)
        sums[b][e] += __shfl_xor_sync(kAllLanes, sums[b][e], offset);
      if (lane < kAcross) sums_of[warp][b][place + e] = sums[b][e];
    }
  }
  __syncthreads();  // every warp's sums
  for (int i = threadIdx.x; i < kBatch * kColumns; i += kThreads) {
    const int b = i / kColumns, at = i % kColumns, output = blockIdx.x * kColumns + at;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums_of[w][b][at];
    if (output < outputs) store_output<T>(p, first_row + b, head, output, sum);
  }
}

template <class T, int kElems, int kBatch>
void launch(const HeadProductsParams& p, cudaStream_t stream) {
  const int64_t piece = p.transposed ? kAcross * kElems : kWarps * kOutputs;
  const dim3 grid(static_cast<unsigned>((p.outputs + piece - 1) / piece), static_cast<unsigned>(p.heads),
                  static_cast<unsigned>((p.batch + kBatch - 1) / kBatch));
  const dim3 block(kThreads);
  const size_t smem_bytes = kBatch * p.inputs * sizeof(float);
  static_assert(4 * kMaxHeadInputs * sizeof(float) <= 40 * 1024, "inputs fit beside the sums in 48 KB");
  const auto kernel =
      p.transposed ? rows_of_outputs_kernel<T, kElems, kBatch> : rows_of_inputs_kernel<T, kElems, kBatch>;
  HF_FASTPATH_CUDA_CHECK(
      launch_programmatic(kernel, grid, block, smem_bytes, stream, p.programmatic_launch, p));
}

}  // namespace

void launch_head_products(const HeadProductsParams& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kElems = kVecElems<T>;
    const int64_t dense = p.transposed ? p.outputs : p.inputs;
    const bool whole = dense % kElems == 0 && is_aligned16(p.weight) && p.weight_row_stride % kElems == 0 &&
                       p.weight_head_stride % kElems == 0;
    if (p.batch == 1) return whole ? launch<T, kElems, 1>(p, stream) : launch<T, 1, 1>(p, stream);
    return whole ? launch<T, kElems, 4>(p, stream) : launch<T, 1, 4>(p, stream);
  });
}

}  // namespace hf_fastpath
