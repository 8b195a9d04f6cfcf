// Routes of packed_gemm that are not gemm's.
#pragma once

#include "common/routes_cpu.h"

namespace hf_fastpath {

// Up to so many rows of x at a time by a route of packed_gemv.
RunProduct packed_in_pieces_16, packed_in_pieces_32;

}  // namespace hf_fastpath
