// What: sum = residual + x, which is kept in float32, and its RMS norm, rounded once.
// Work split: one block a row, up to 1024 threads of 1 to 4 chunks of 16 bytes of x held in registers; longer
//   rows are read twice, the second time as the sum that was written.
// Traffic: (2 * sizeof(T) + 8) * rows * columns, and the weight, which stays in L2.
// Roofline: latency of one load, one reduction and one store for one row, as of rms_norm.

#include "add_rms_norm/add_rms_norm.h"
#include "common/inverse_root.cuh"
#include "common/row_norm.cuh"

namespace hf_fastpath {
namespace {

template <class T>
struct AddNormParams : NormParams<T> {
  const float* wide;  // the residual
  float* sum;
};

// Elements [i, i + kElems) of a float32 row.
template <int kElems>
__device__ __forceinline__ void load_wide(const float* row, int i, float (&values)[kElems]) {
  if constexpr (kElems == 1) {
    values[0] = __ldcg(row + i);
  } else {
#pragma unroll
    for (int e = 0; e < kElems; e += 4) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(row + i + e));
      values[e] = four.x, values[e + 1] = four.y, values[e + 2] = four.z, values[e + 3] = four.w;
    }
  }
}

template <int kElems>
__device__ __forceinline__ void store_wide(float* row, int i, const float (&values)[kElems]) {
  if constexpr (kElems == 1) {
    row[i] = values[0];
  } else {
#pragma unroll
    for (int e = 0; e < kElems; e += 4) {
      *reinterpret_cast<float4*>(row + i + e) =
          make_float4(values[e], values[e + 1], values[e + 2], values[e + 3]);
    }
  }
}

template <class T, int kElems, int kChunks>
__global__ void __launch_bounds__(kMaxNormThreads) add_rms_norm_kernel(AddNormParams<T> p) {
  using C = Chunk<T, kElems>;
  constexpr int kHeld = kChunks > 0 ? kChunks : 1;
  __shared__ float scratch[kWarpSize];
  const int64_t at = blockIdx.x * int64_t(p.columns);
  const int step = blockDim.x * kElems, begin = threadIdx.x * kElems;
  typename C::Raw weight = C::zero();
  allow_next_kernel();
  // The weight of a step's row comes out of memory while the kernel in front still runs.
  const bool has_weight = kChunks == 1 && p.programmatic_launch;
  if (has_weight && begin < p.columns) weight = C::load_shared_line(p.weight + begin);
  wait_for_previous_kernel();

  float held[kHeld][kElems], squares = 0.f;
  const auto add = [&](int i, float (&total)[kElems]) {
    const auto raw = C::load_l2(p.x + at + i);
    load_wide(p.wide + at, i, total);
    float values[kElems];
    C::unpack(raw, values);
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      total[e] += values[e];
      squares = fmaf(total[e], total[e], squares);
    }
    store_wide(p.sum + at, i, total);
  };
  if constexpr (kChunks > 0) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      if (begin + c * step < p.columns) add(begin + c * step, held[c]);
  } else {
    for (int i = begin; i < p.columns; i += step) add(i, held[0]);
  }

  const float scale = inverse_root<T>(block_sum(squares, scratch) / p.columns + p.eps);
  const auto emit = [&](int i, const float (&total)[kElems]) {
    float factors[kElems], y[kElems];
    C::unpack(has_weight ? weight : C::load_readonly(p.weight + i), factors);
#pragma unroll
    for (int e = 0; e < kElems; ++e) y[e] = total[e] * scale * factors[e];
    C::store(p.out + at + i, y);
  };
  if constexpr (kChunks > 0) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      if (begin + c * step < p.columns) emit(begin + c * step, held[c]);
  } else {
    for (int i = begin; i < p.columns; i += step) {  // what this thread has written
      load_wide(p.sum + at, i, held[0]);
      emit(i, held[0]);
    }
  }
}

struct AddRmsNorm {
  template <class T, int kElems, int kChunks>
  static void run(const AddNormParams<T>& p, dim3 grid, dim3 block, cudaStream_t stream) {
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(add_rms_norm_kernel<T, kElems, kChunks>, grid, block, 0,
                                               stream, uses_programmatic_launch(p), p));
  }
};

}  // namespace

void launch_add_rms_norm(const void* x, const float* residual, const void* weight, void* out, float* sum,
                         int64_t rows, int64_t columns, float eps, bool programmatic_launch, DType dtype,
                         cudaStream_t stream) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    AddNormParams<T> p{};
    p.x = static_cast<const T*>(x), p.weight = static_cast<const T*>(weight), p.out = static_cast<T*>(out);
    p.rows = rows, p.columns = static_cast<int>(columns), p.eps = eps;
    p.programmatic_launch = programmatic_launch;
    p.wide = residual, p.sum = sum;
    launch_norm<AddRmsNorm>(p, stream, is_aligned16(residual) && is_aligned16(sum));
  });
}

}  // namespace hf_fastpath
