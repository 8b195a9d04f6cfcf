// Which kernel a matrix product of 1 to 16 x rows gets.

#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "gemv/gemv.h"

namespace hf_fastpath {
namespace {

// Whether every access of the tensor-core kernels is 16 bytes, aligned.
bool fits_mma(const GemvParams& p, const RopeAppendParams*) {
  constexpr int kElems = kVecElems<__half>;
  bool fits = p.dtype != DType::kFloat32 && p.k % kElems == 0 && is_aligned16(p.x);
  for (int i = 0; i < p.num_segments; ++i) {
    fits = fits && is_aligned16(p.segments[i].weight) && p.segments[i].stride % kElems == 0;
  }
  return fits && (!p.transposed || p.n % kElems == 0);
}

using Fits = bool (*)(const GemvParams&, const RopeAppendParams*);
using Launch = void (*)(const GemvParams&, const RopeAppendParams*, cudaStream_t);

// A kernel (its file has that name) and the products it is for.
struct Variant {
  const char* name;
  bool transposed;         // weights [k, n]
  int min_rows, max_rows;  // of x
  bool half_only;          // 16-bit types
  Fits fits;               // what else it needs
  Launch launch;

  bool takes(const GemvParams& p, const RopeAppendParams* rope) const {
    return p.transposed == transposed && p.m >= min_rows && p.m <= max_rows &&
           !(half_only && p.dtype == DType::kFloat32) && fits(p, rope);
  }
};

bool fits_always(const GemvParams&, const RopeAppendParams*) { return true; }
void launch_mma(const GemvParams& p, const RopeAppendParams*, cudaStream_t stream) {
  launch_gemv_mma(p, stream);
}
void launch_rows(const GemvParams& p, const RopeAppendParams*, cudaStream_t stream) {
  launch_gemv_rows(p, stream);
}

// The first that takes a product gets it. What a step of a model reaches with it, share of read bandwidth on
// an H200, 2026-11 (docs/performance.md; benchmarks/trace_step.py and bench_ops.py give the figures again):
//   gemv_ring         Mistral-7B fp16 93 %, TinyLlama bf16 73; its code for sm_80 80 and 47, gemv_rows 72, 46
//   gemv_ring_rows    Mistral-7B fp16, 2, 4, 8 rows: 89, 86, 83 %; for sm_80 2 and 8: 77, 71, gemv_mma 70 for
//   8 gemv_mma          9 to 16 rows 57 to 82 % for single products gemv_columns_mma  GPT-2 fp16 20 %, on
//   CUDA cores 18 gemv_columns      GPT-2 fp32 30 % gemv_rows         everything else
constexpr Variant kVariants[] = {
    {"gemv_ring", false, 1, 1, false, fits_gemv_ring, launch_gemv_ring},
    {"gemv_ring_rows", false, 2, 8, true, fits_gemv_ring_rows, launch_gemv_ring_rows},
    {"gemv_mma", false, 2, kMaxGemvRows, true, fits_mma, launch_mma},
    {"gemv_columns_mma", true, 1, kMaxGemvRows, true, fits_mma, launch_gemv_columns_mma},
    {"gemv_columns", true, 1, kMaxGemvRows, false, fits_always, launch_gemv_columns},
    {"gemv_rows", false, 1, kMaxGemvRows, false, fits_always, launch_rows},
};

}  // namespace

bool fits_one_kernel(const GemvParams& params, const RopeAppendParams* rope) {
  return fits_gemv_ring(params, rope) || fits_gemv_ring_rows(params, rope) || fits_gemv_columns(params, rope);
}

void launch_gemv(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream) {
  if (params.n == 0) return;
  for (const Variant& variant : kVariants) {
    if (variant.takes(params, rope)) return variant.launch(params, rope, stream);
  }
}

}  // namespace hf_fastpath
