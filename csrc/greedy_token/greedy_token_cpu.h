// Argmax of a row of logits on the CPU: kernel interface, free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

// Index of the first of the largest of `count` values, at least one; -1 where one is NaN.
int64_t argmax_avx2(DType dtype, const void* values, int64_t count);

}  // namespace hf_fastpath
