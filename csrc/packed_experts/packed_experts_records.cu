// What: packed_experts.h's product for weights whose blocks have records instead of scales
//   (packed_formats.py:RECORDS), on CUDA cores.
// Work split: a warp takes a feature of a choice, of gate and up both when gated.
// Traffic: quants and records of the chosen experts once for each row that chose them, out of L2 from the
//   second on.
// Roofline: instructions, as of packed_gemv_records.cu: a first form, which no GPU has run yet.
#include "common/activation.cuh"
#include "common/cuda_check.cuh"
#include "packed_experts/packed_experts.h"
#include "weights/packed_records.cuh"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 4;  // of a block
constexpr int kThreads = kWarps * kWarpSize;

__device__ __forceinline__ float gate_of(const PackedExpertsProduct& p, float gate, float up) {
  if (!p.clamped) return activate(gate, p.activation) * up;
  gate = gate > p.limit ? p.limit : gate;  // NaN stays NaN
  up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
  return gate / (1.f + expf(-p.alpha * gate)) * (up + 1.f);
}

template <class T, PackedFormat kFormat, bool kGated, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    packed_experts_records_kernel(const __grid_constant__ PackedExpertsProduct p) {
  constexpr int kParts = kGated ? 2 : 1;
  const int n = blockIdx.x * kWarps + threadIdx.x / kWarpSize, choice = blockIdx.y;
  if (n >= p.features) return;
  const int64_t expert = p.choices.ids[choice];
  if (expert < 0 || expert >= p.choices.num_experts) return;  // nobody reads its products
  const int64_t first = expert * kParts * p.features;
  int64_t rows[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    rows[part] = first + (kGated && p.alternating ? 2 * int64_t(n) + part : n + int64_t(part) * p.features);
  const T* const x = static_cast<const T*>(p.x) + int64_t(kGated ? choice / p.choices.top_k : choice) * p.k;
  std::conditional_t<sizeof(T) == 4, double, float> sums[kParts][1] = {};  // float32 x keeps every bit
  add_record_products<kFormat, kWhole>(p.matrix, p.quants, rows, p.k, [&](int) { return x; }, sums);
  float all[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    all[part] = sum_of_lanes(sums[part][0]) * p.matrix.multiplier;
    if (p.bias != nullptr) all[part] += to_float(static_cast<const T*>(p.bias)[rows[part]]);
  }
  if (threadIdx.x % kWarpSize != 0) return;
  const int64_t at = int64_t(choice) * p.features + n;
  if constexpr (kGated) {
    static_cast<T*>(p.out)[at] = from_float<T>(gate_of(p, all[0], all[1]));
  } else {
    static_cast<float*>(p.out)[at] = all[0];
  }
}

template <class T, PackedFormat kFormat>
void launch_typed(const PackedExpertsProduct& p, cudaStream_t stream) {
  const dim3 grid((p.features + kWarps - 1) / kWarps, p.choices.rows * p.choices.top_k), block(kThreads);
  if (grid.x == 0 || grid.y == 0) return;
  const bool whole = p.aligned && p.k % 8 == 0;
  const auto run = [&](auto kernel) { kernel<<<grid, block, 0, stream>>>(p); };
  if (p.gated) {
    run(whole ? packed_experts_records_kernel<T, kFormat, true, true>
              : packed_experts_records_kernel<T, kFormat, true, false>);
  } else {
    run(whole ? packed_experts_records_kernel<T, kFormat, false, true>
              : packed_experts_records_kernel<T, kFormat, false, false>);
  }
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void launch_packed_experts_records(const PackedExpertsProduct& params, cudaStream_t stream) {
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_format(params.matrix.format, [&](auto format) {
      constexpr PackedFormat kFormat = decltype(format)::value;
      if constexpr (reads_records(kFormat)) launch_typed<T, kFormat>(params, stream);
    });
  });
}

}  // namespace hf_fastpath
