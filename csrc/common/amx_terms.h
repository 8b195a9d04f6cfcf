// What the products in tiles of AMX share with those who choose them: free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

// Numbers in bfloat16 that a value of x is multiplied as. Those of float16 are its first eight significant
// bits and the others.
constexpr int64_t tile_terms(DType dtype) { return dtype == DType::kFloat16 ? 2 : 1; }

// Most rows of x that a product takes whose tiles of weights are made once for all of them. gemm's tiles take
// more.
constexpr int64_t kMaxPackedAmxRows = 64;

}  // namespace hf_fastpath
