// What: products of few rows of x with a quantized weight whose blocks have records instead of scales
//   (packed_formats.py:RECORDS), on CUDA cores, with bias, activation and residual, or the gated pair.
// Work split: a warp takes an output feature, of gate and up both when gated, and up to four rows of x; a
// lane
//   takes 16 bytes of quants at a time, which hold a word of each sub-block, so that it needs a record's four
//   pairs of scale and minimum. More rows of x are further blocks, whose quants come out of L2.
// Traffic: quants and records once; x per SM out of L2, and from there through L1.
// Roofline: instructions, some seven for two weights: a first form, which no GPU has run yet.
#include "common/cuda_check.cuh"
#include "gemv/gemv_device.cuh"
#include "packed_gemv/packed_gemv.h"
#include "weights/packed_records.cuh"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 4;  // of a block: enough blocks for all SMs where features are few
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kMostX = 4;  // rows of x a warp keeps sums of; of float32, for which registers are short, half

template <class T, PackedFormat kFormat, int kX, bool kGated>
__global__ void __launch_bounds__(kThreads)
    packed_gemv_records_kernel(const __grid_constant__ GemvParams p, PackedMatrix matrix, int x_width) {
  constexpr int kParts = kGated ? 2 : 1;
  const int n = blockIdx.x * kWarps + threadIdx.x / kWarpSize, first_m = blockIdx.y * kX;
  if (n >= p.n) return;
  const T* const x = static_cast<const T*>(p.x);
  float sums[kParts][kX] = {};
  int64_t rows[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) rows[part] = n + int64_t(part) * p.n;
  const auto x_of = [&](int m) { return x + int64_t(min(first_m + m, p.m - 1)) * x_width; };
  add_record_products<kFormat, true>(matrix, p.segments[0].weight, rows, x_width, x_of, sums);
#pragma unroll
  for (int m = 0; m < kX; ++m) {
    float all[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) all[part] = sum_of_lanes<T>(sums[part][m]) * matrix.multiplier;
    const int row = first_m + m;
    if (threadIdx.x % kWarpSize != 0 || row >= p.m) continue;
    if constexpr (kGated) {
      finish_gated<T>(p, row, n, all[0], all[1]);
    } else {
      finish<T>(p, row, n, all[0], load_addends<T>(p, row, n));
    }
  }
}

template <class T, PackedFormat kFormat, int kX>
void launch_rows(const GemvParams& p, const PackedMatrix& matrix, int x_width, cudaStream_t stream) {
  const dim3 grid((p.n + kWarps - 1) / kWarps, (p.m + kX - 1) / kX), block(kThreads);
  if (p.gated) {
    packed_gemv_records_kernel<T, kFormat, kX, true><<<grid, block, 0, stream>>>(p, matrix, x_width);
  } else {
    packed_gemv_records_kernel<T, kFormat, kX, false><<<grid, block, 0, stream>>>(p, matrix, x_width);
  }
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void launch_packed_gemv_records(const GemvParams& p, int x_width, const PackedMatrix& matrix,
                                cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_format(matrix.format, [&](auto format) {
      constexpr PackedFormat kFormat = decltype(format)::value;
      if constexpr (reads_records(kFormat)) {
        if (p.m == 1) return launch_rows<T, kFormat, 1>(p, matrix, x_width, stream);
        if (p.m == 2) return launch_rows<T, kFormat, 2>(p, matrix, x_width, stream);
        launch_rows<T, kFormat, sizeof(T) == 4 ? kMostX / 2 : kMostX>(p, matrix, x_width, stream);
      }
    });
  });
}

}  // namespace hf_fastpath
