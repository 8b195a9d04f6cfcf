// x as kernels of packed_gemv take it on the CPU.
#pragma once

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "packed_gemv/packed_gemv_cpu.h"
#include "weights/packed_tensors_cpu.h"

namespace hf_fastpath {

// Rows of x in float32, `width` apart, zeros behind x's.
inline void convert_rows(DType dtype, const RowView& x, int64_t width, float* to) {
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  for (int64_t row = 0; row < x.rows; ++row, to += width) {
    convert(dtype, at(x.data, row * x.stride, dtype), to, x.columns);
    std::fill(to + x.columns, to + width, 0.0f);
  }
}

}  // namespace hf_fastpath
