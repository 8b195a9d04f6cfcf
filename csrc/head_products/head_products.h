// Torch-free launch of products of each head on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "head_products/head_products_params.h"

namespace hf_fastpath {

void launch_head_products(const HeadProductsParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
