// Which kernel a matrix product of 1 to 64 x rows gets.

#include <stdexcept>
#include <string>

#include "gemv/gemv_device.cuh"

namespace hf_fastpath {
namespace {

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

// Products alone: no norm in front, no append behind.
bool fits_rows(const GemvParams& p, const RopeAppendParams* rope) {
  return p.norm.kind == NormKind::kNone && !rope;
}
bool fits_mma(const GemvParams& p, const RopeAppendParams* rope) {
  return fits_rows(p, rope) && has_aligned_rows(p);
}
bool fits_columns_mma(const GemvParams& p, const RopeAppendParams* rope) {
  return fits_gemv_columns(p, rope) && has_aligned_rows(p);
}
void launch_mma(const GemvParams& p, const RopeAppendParams*, cudaStream_t stream) {
  launch_gemv_mma(p, stream);
}
void launch_rows(const GemvParams& p, const RopeAppendParams*, cudaStream_t stream) {
  launch_gemv_rows(p, stream);
}

// The first that takes a product gets it. What a step of a model reaches with it, share of read bandwidth on
// an H200, 2026-11 (docs/performance.md; benchmarks/trace_step.py and bench_ops.py give the figures again):
//   gemv_ring: Mistral-7B fp16 93 %, TinyLlama bf16 73; code for sm_80 80 and 47, gemv_rows there 72, 46
//   gemv_ring_rows: Mistral-7B fp16 with 2, 4, 8 rows 89, 86, 83 %; for sm_80 77 with 2, 71 with 8
//   gemv_wgmma: see there
//   gemv_mma: 9 to 16 rows 57 to 82 % for single products; for sm_80 a step of 8 rows 70
//   gemv_columns_mma: GPT-2 fp16 20 %, on CUDA cores 18
//   gemv_columns: GPT-2 fp32 30 %
//   gemv_rows: everything else
constexpr Variant kVariants[] = {
    {"gemv_ring", false, 1, 1, false, fits_gemv_ring, launch_gemv_ring},
    {"gemv_ring_rows", false, 2, 8, true, fits_gemv_ring_rows, launch_gemv_ring_rows},
    {"gemv_wgmma", false, 9, kMaxWgmmaRows, true, fits_gemv_wgmma, launch_gemv_wgmma},
    {"gemv_mma", false, 2, kMaxGemvRows, true, fits_mma, launch_mma},
    {"gemv_columns_mma", true, 1, kMaxGemvRows, true, fits_columns_mma, launch_gemv_columns_mma},
    {"gemv_columns", true, 1, kMaxGemvRows, false, fits_gemv_columns, launch_gemv_columns},
    {"gemv_rows", false, 1, kMaxGemvRows, false, fits_rows, launch_rows},
};

const Variant* variant_for(const GemvParams& p, const RopeAppendParams* rope) {
  for (const Variant& variant : kVariants) {
    if (variant.takes(p, rope)) return &variant;
  }
  return nullptr;
}

}  // namespace

bool fits_one_kernel(const GemvParams& params, const RopeAppendParams* rope) {
  return variant_for(params, rope) != nullptr;
}

void launch_gemv(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream) {
  if (params.n == 0) return;
  const Variant* const variant = variant_for(params, rope);
  if (!variant) {
    throw std::runtime_error("hf_fastpath: x has " + std::to_string(params.m) + " rows, expected at most " +
                             std::to_string(kMaxGemvRows) +
                             " (64 with aligned 16-bit rows of [out, in] weights, on compute capability "
                             "9.0): use nn.Linear");
  }
  variant->launch(params, rope, stream);
}

}  // namespace hf_fastpath
