// What tables of routes are written in, on the CPU and on a GPU: sets of weights and of dtypes. This file is
// free of torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

// A set of weights: a matrix, a transposed matrix, and each packed format.
using WeightSet = uint32_t;
constexpr WeightSet kPlainWeight = 1, kTransposedWeight = 2;
constexpr WeightSet packed_weight(int format) { return WeightSet{4} << format; }

// A set of dtypes.
using DTypeSet = uint32_t;
constexpr DTypeSet set_of(DType dtype) { return DTypeSet{1} << static_cast<int>(dtype); }

}  // namespace hf_fastpath
