// What packed_gemv and packed_gemm share on the CPU: choices, x as kernels take it, runs over all outputs.
#pragma once

#include <atomic>

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "packed_gemv/packed_gemv_cpu.h"
#include "weights/packed_tensors_cpu.h"

namespace hf_fastpath {

// Whether x is multiplied in float32, by packed_floats_avx2(), and not as steps or by what takes few rows of
// fp8: weights that are dequantized once for all rows, for the more the better. With AVX-512 the others are
// faster.
inline bool takes_floats(DType dtype, PackedFormat format, int64_t rows) {
  if (!use_avx2()) return false;
  if (dtype == DType::kFloat32 && !is_float(format)) return true;
  return !use_avx512() && bits_of(format) == 8 && rows > (is_float(format) ? 2 : 4);
}

// packed_gemv without a norm, of up to kPackedRows of x, or kDequantizedRows if takes_floats().
Tensor packed_rows_cpu(const Tensor& x, const Tensor& raw_quants, const Tensor& raw_scales,
                       const std::optional<Tensor>& raw_zeros, double multiplier, int64_t format,
                       const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                       int64_t activation);

// Rows of x in float32, `width` apart, zeros behind x's.
inline void convert_rows(DType dtype, const RowView& x, int64_t width, float* to) {
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  for (int64_t row = 0; row < x.rows; ++row, to += width) {
    convert(dtype, at(x.data, row * x.stride, dtype), to, x.columns);
    std::fill(to + x.columns, to + width, 0.0f);
  }
}

// packed_gemm_amx() on all outputs. False where a sum is not finite.
inline bool run_packed_amx(const PackedArgs& args) {
  constexpr int64_t kGranule = 32;  // the most outputs that the kernel takes at a time
  std::atomic<bool> finite{true};
  share_out(args.weight.out_features, output_parts(args.weight), kGranule,
            least_piece(args.weight.output_bytes()), [&](int64_t begin, int64_t end) {
              if (!packed_gemm_amx(args, begin, end)) finite.store(false, std::memory_order_relaxed);
            });
  return finite;
}

}  // namespace hf_fastpath
