// Which form of gemv_rows_kernel (gemv_rows.cuh) a shape gets.

#include "gemv/gemv_rows.cuh"

namespace hf_fastpath {
namespace {

// Weight loads in flight a lane: 4 * 16 bytes * 32 lanes * 32 warps = 64 KB an SM, more than twice what the latency
// of device memory needs; more only adds idle steps at the end of a row.
constexpr int kLoads = 4;
// Warps an SM should have before splitting k stops.
constexpr int kWantedWarpsPerSm = 24;

// Warps that share an output feature: enough for every SM, as long as each still has a step of its own.
int warps_per_row(const GemvParams& p, int elems, int rows, int loads_per_step) {
  const int64_t warps = (p.n + rows - 1) / rows;
  const int64_t wanted = int64_t(multiprocessor_count()) * kWantedWarpsPerSm;
  const int64_t steps = p.k / (int64_t(elems) * kWarpSize * loads_per_step);
  int split = 1;
  while (split < kRowsWarps && warps * split < wanted && steps >= 2 * split) split *= 2;
  return split;
}

template <class T, int kElems, int kX, int kRows, bool kGated>
void launch_form(const GemvParams& p, cudaStream_t stream) {
  constexpr int kWeightRows = kRows * (kGated ? 2 : 1);
  const int split = warps_per_row(p, kElems, kRows, kLoads / kWeightRows);
  launch_rows_kernel<T, kElems, kX, kRows, kGated, kLoads>(p, split, stream);
}

template <class T, int kElems, bool kGated>
void launch_x_rows(const GemvParams& p, cudaStream_t stream) {
  [[maybe_unused]] constexpr int kWide = kGated ? 1 : 2;  // features a warp: gate and up count as two
  if (p.m == 1) {
    // A row of a few loads a lane: several rows a warp, so that kLoads loads are in flight from the start.
    const int64_t loads_per_row = p.k / (int64_t(kElems) * kWarpSize);
    const bool many = p.n >= int64_t(multiprocessor_count()) * kWantedWarpsPerSm * 4;
    if (!kGated && many && loads_per_row <= kLoads / 4) return launch_form<T, kElems, 1, kGated ? 1 : 4, kGated>(p, stream);
    if (many && loads_per_row <= kLoads / 2) return launch_form<T, kElems, 1, 2, kGated>(p, stream);
    return launch_form<T, kElems, 1, 1, kGated>(p, stream);
  }
  if constexpr (sizeof(T) == 4) {  // aligned 16-bit weights go to gemv_mma.cu
    if (p.m == 2) return launch_form<T, kElems, 2, kWide, kGated>(p, stream);
    if (p.m <= 4) return launch_form<T, kElems, 4, kWide, kGated>(p, stream);
    // Many x rows: two to four weight rows share each load of x, which would otherwise fill L1's bandwidth.
    if (p.m <= 8) return launch_form<T, kElems, 8, 2 * kWide, kGated>(p, stream);
    return launch_form<T, kElems, 16, 2 * kWide, kGated>(p, stream);
  }
}

template <class T, bool kGated>
void launch_typed(const GemvParams& p, cudaStream_t stream) {
  constexpr int kElems = kVecElems<T>;
  bool aligned = is_aligned16(p.x) && p.k % kElems == 0;
  for (int i = 0; i < p.num_segments; ++i) {
    aligned = aligned && is_aligned16(p.segments[i].weight) && p.segments[i].stride % kElems == 0;
  }
  if (aligned && (sizeof(T) == 4 || p.m == 1)) return launch_x_rows<T, kElems, kGated>(p, stream);
  // Rows that start anywhere: element by element, the same code with chunks of one.
  if (p.m == 1) return launch_form<T, 1, 1, 1, kGated>(p, stream);
  if (p.m <= 4) return launch_form<T, 1, 4, kGated ? 1 : 2, kGated>(p, stream);
  return launch_form<T, 1, 16, kGated ? 1 : 2, kGated>(p, stream);
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
