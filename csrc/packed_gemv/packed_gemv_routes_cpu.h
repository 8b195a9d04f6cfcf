// Routes of packed_gemv.
#pragma once

#include "common/routes_cpu.h"

namespace hf_fastpath {

RunProduct packed_in_tiles;  // of up to kMaxPackedAmxRows; declines where a sum in float16 is not finite

// These take up to kPackedRows of x: in steps, and rows that are not finite in float32 by themselves.
RunProduct packed_in_steps_vnni, packed_in_steps_avx512, packed_in_steps_avx2;

// x in float32: of weights in fp8, and of any; packed_in_floats takes up to kDequantizedRows.
RunProduct packed_in_fp8_vnni, packed_in_fp8_avx512, packed_in_fp8_avx2, packed_in_floats, packed_portable;

}  // namespace hf_fastpath
