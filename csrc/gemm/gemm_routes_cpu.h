// Routes of gemm, which also take a quantized weight.
#pragma once

#include "common/routes_cpu.h"

namespace hf_fastpath {

RunProduct gemm_in_tiles;  // declines where a sum is not finite that may have to be
RunProduct gemm_in_pairs, gemm_by_gemv, gemm_by_torch, gemm_blocked_avx512, gemm_blocked_avx2, gemm_widened;

}  // namespace hf_fastpath
