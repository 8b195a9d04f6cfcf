// Which variant of gemv_rows_kernel (gemv_rows.cuh) a shape gets.

#include "gemv/gemv_rows.cuh"

namespace hf_fastpath {
namespace {

// Weight loads in flight a lane. 4 * 16 bytes * 32 lanes * 32 warps are 64 KB an SM, more than twice what the
// latency of device memory needs; the variants for long rows take twice that from fewer warps.
constexpr int kLoads = 4, kLoadsWide = 8;
// Warps an SM should have before splitting k stops.
constexpr int kWantedWarpsPerSm = 24;

// Warps of a block that share output features: as many as possible, as long as at least kMinBusy of their
// steps have weights to load.
int split_evenly(const GemvParams& p, int elems_per_step) {
  constexpr double kMinBusy = 0.85;
  const double steps = static_cast<double>(p.k) / elems_per_step;
  int best = 1;
  for (int split = 2; split <= kRowsWarps; split *= 2) {
    const double rounds =
        static_cast<double>((p.k + int64_t(elems_per_step) * split - 1) / (int64_t(elems_per_step) * split));
    if (steps >= kMinBusy * rounds * split) best = split;
  }
  return best;
}

// Warps of a block that share output features: no more than it takes to give every SM its warps.
int split_to_fill(const GemvParams& p, int elems_per_step, int rows) {
  const int64_t wanted = int64_t(multiprocessor_count()) * kWantedWarpsPerSm;
  const int64_t groups = (p.n + rows - 1) / rows;
  int split = 1;
  while (split < kRowsWarps && groups * split < wanted && p.k >= int64_t(elems_per_step) * split * 2)
    split *= 2;
  return split;
}

template <class T, int kElems, int kX, int kRows, bool kGated>
void launch_variant(const GemvParams& p, cudaStream_t stream) {
  constexpr int kWeightRows = kRows * (kGated ? 2 : 1);
  constexpr int kStep = kElems * kWarpSize * (kLoads > kWeightRows ? kLoads / kWeightRows : 1);
  launch_rows_kernel<T, kElems, kX, kRows, kGated, kLoads>(p, split_to_fill(p, kStep, kRows), stream);
}

// One x row: the variants differ in how many weight rows a warp takes and how many warps share them. Which
// wins where was measured on an H200 in float16, over 768 to 14336 features in and 768 to 50257 out.
template <class T, int kElems, bool kGated>
void launch_one_x_row(const GemvParams& p, cudaStream_t stream) {
  constexpr int kParts = kGated ? 2 : 1;
  constexpr int kRowElems = kElems * kWarpSize;  // of a weight row that one load of a warp covers
  const int64_t waves = int64_t(p.n) * kParts / (multiprocessor_count() * kWantedWarpsPerSm);
  if (p.k <= 4 * kRowElems && waves >= 4) {  // many short rows: four a warp, all in flight at once
    return launch_rows_kernel<T, kElems, 1, 4 / kParts, kGated, kLoads>(p, 1, stream);
  }
  if (p.k <= 8 * kRowElems && waves >= 1) {
    return launch_rows_kernel<T, kElems, 1, 2 / kParts, kGated, kLoads>(p, 1, stream);
  }
  if (p.k <= 8 * kRowElems) return launch_variant<T, kElems, 1, 1, kGated>(p, stream);
  // Long rows: the warps of a block share four, one step each if they can, so that everything a block needs
  // is in flight at once and blocks end evenly.
  return launch_rows_kernel<T, kElems, 1, 4 / kParts, kGated, kLoadsWide>(
      p, split_evenly(p, kRowElems * kLoadsWide / 4), stream);
}

template <class T, int kElems, bool kGated>
void launch_x_rows(const GemvParams& p, cudaStream_t stream) {
  if (p.m == 1) return launch_one_x_row<T, kElems, kGated>(p, stream);
  if constexpr (sizeof(T) == 4) {          // aligned 16-bit weights go to gemv_mma.cu
    constexpr int kWide = kGated ? 1 : 2;  // features a warp: gate and up count as two
    if (p.m == 2) return launch_variant<T, kElems, 2, kWide, kGated>(p, stream);
    if (p.m <= 4) return launch_variant<T, kElems, 4, kWide, kGated>(p, stream);
    // Many x rows: four weight rows share each load of x, which would otherwise fill L1's bandwidth.
    if (p.m <= 8) return launch_variant<T, kElems, 8, 2 * kWide, kGated>(p, stream);
    return launch_variant<T, kElems, 16, 2 * kWide, kGated>(p, stream);
  }
}

template <class T, bool kGated>
void launch_typed(const GemvParams& p, cudaStream_t stream) {
  constexpr int kElems = kVecElems<T>;
  if (has_aligned_rows(p) && (sizeof(T) == 4 || p.m == 1)) return launch_x_rows<T, kElems, kGated>(p, stream);
  // Rows that start anywhere: element by element, the same code with chunks of one.
  if (p.m == 1) return launch_variant<T, 1, 1, 1, kGated>(p, stream);
  if (p.m <= 4) return launch_variant<T, 1, 4, kGated ? 1 : 2, kGated>(p, stream);
  return launch_variant<T, 1, 16, kGated ? 1 : 2, kGated>(p, stream);
}

}  // namespace

void launch_gemv_rows(const GemvParams& params, cudaStream_t stream) {
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (params.gated) {
      launch_typed<T, true>(params, stream);
    } else {
      launch_typed<T, false>(params, stream);
    }
  });
}

}  // namespace hf_fastpath
