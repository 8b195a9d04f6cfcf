// A quantized matrix as the kernels on the CPU take it.
#pragma once

#include <atomic>

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "packed_gemv/packed_gemv_cpu.h"
#include "packed_gemv/packed_gemv_glue.h"

namespace hf_fastpath {

// Its tensors, contiguous; they have to live until the call is done.
struct PackedTensors {
  Tensor quants, scales;
  std::optional<Tensor> zeros;

  PackedTensors(const Tensor& raw_quants, const Tensor& raw_scales, const std::optional<Tensor>& raw_zeros)
      : quants(hf_fastpath::contiguous(raw_quants)), scales(hf_fastpath::contiguous(raw_scales)) {
    if (raw_zeros.has_value()) zeros = hf_fastpath::contiguous(*raw_zeros);
  }

  // What tells of the weight, once it is checked that it has `in_features`.
  PackedArgs args(int64_t in_features, double multiplier, int64_t format, const char* op) const {
    const PackedShape shape = check_packed(in_features, quants, scales, zeros, format, op);
    PackedArgs args{};
    args.format = shape.format, args.out_features = shape.rows, args.blocks = shape.blocks,
    args.groups = shape.groups;
    args.quants = static_cast<const uint8_t*>(quants.const_data_ptr());
    args.scales = static_cast<const uint16_t*>(scales.const_data_ptr());
    args.zeros = zeros.has_value() ? static_cast<const uint8_t*>(zeros->const_data_ptr()) : nullptr;
    args.multiplier = static_cast<float>(multiplier);
    return args;
  }
};

// How many parts its outputs are worth dividing into.
inline int64_t output_parts(const PackedArgs& args) {
  return std::min(part_count(args.out_features * args.output_bytes(), kBytesPerPart), args.out_features);
}

// Whether x is multiplied in float32, by packed_floats_avx2(), and not as steps or by what takes few rows of
// fp8: weights that are dequantized once for all rows, for the more the better. With AVX-512 the others are
// faster.
inline bool takes_floats(DType dtype, PackedFormat format, int64_t rows) {
  if (!use_avx2()) return false;
  if (dtype == DType::kFloat32 && format != PackedFormat::kFp8) return true;
  return !use_avx512() && bits_of(format) == 8 && rows > (format == PackedFormat::kFp8 ? 2 : 4);
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
  share_out(args.out_features, output_parts(args), kGranule, least_piece(args.output_bytes()),
            [&](int64_t begin, int64_t end) {
              if (!packed_gemm_amx(args, begin, end)) finite.store(false, std::memory_order_relaxed);
            });
  return finite;
}

}  // namespace hf_fastpath
