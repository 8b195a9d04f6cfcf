// Which kernel a matrix product of 1 to 16 x rows gets: see gemv_ring.cuh, gemv_ring_mma.cuh, gemv_rows.cuh,
// gemv_mma.cu, gemv_columns.cu and gemv_columns_mma.cu.

#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "gemv/gemv.h"

namespace hf_fastpath {
namespace {

// x rows from which tensor cores take over for [n, k] weights: one row is as fast on CUDA cores, whose loads
// take whole lines of a weight row.
constexpr int kMinMmaRows = 2;

// Whether every access of the tensor-core kernels is 16 bytes, aligned.
bool fits_mma(const GemvParams& p) {
  constexpr int kElems = kVecElems<__half>;
  bool fits = p.dtype != DType::kFloat32 && p.k % kElems == 0 && is_aligned16(p.x);
  for (int i = 0; i < p.num_segments; ++i) {
    fits = fits && is_aligned16(p.segments[i].weight) && p.segments[i].stride % kElems == 0;
  }
  return fits && (!p.transposed || p.n % kElems == 0);
}

}  // namespace

bool fits_one_kernel(const GemvParams& params, const RopeAppendParams* rope) {
  return fits_gemv_ring(params, rope) || fits_gemv_ring_mma(params, rope) || fits_gemv_columns(params, rope);
}

void launch_gemv(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream) {
  if (params.n == 0) return;
  if (fits_gemv_ring(params, rope)) return launch_gemv_ring(params, rope, stream);
  if (fits_gemv_ring_mma(params, rope)) return launch_gemv_ring_mma(params, rope, stream);
  if (fits_mma(params)) {
    if (params.transposed) return launch_gemv_columns_mma(params, rope, stream);
    if (params.m >= kMinMmaRows) return launch_gemv_mma(params, stream);
  }
  if (params.transposed) return launch_gemv_columns(params, rope, stream);
  launch_gemv_rows(params, stream);
}

}  // namespace hf_fastpath
