// GELU on the CPU: kernel interface, free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

// out[i] = GELU(x[i]) for `count` contiguous elements of `dtype`.
void gelu_portable(DType dtype, const void* x, void* out, int64_t count, bool tanh_approximation);
void gelu_avx2(DType dtype, const void* x, void* out, int64_t count, bool tanh_approximation);

}  // namespace hf_fastpath
