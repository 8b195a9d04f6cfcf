// Products of each head on the CPU: kernel interface, free of torch.
#pragma once

#include "head_products/head_products_params.h"

namespace hf_fastpath {

// Computes sums[begin, end) of all outputs of one head and row, in float32. x: [inputs] in float32.
void head_product_portable(const HeadProductsParams& p, const void* weight, const float* x, int64_t begin,
                           int64_t end, float* sums);
void head_product_avx2(const HeadProductsParams& p, const void* weight, const float* x, int64_t begin,
                       int64_t end, float* sums);

}  // namespace hf_fastpath
