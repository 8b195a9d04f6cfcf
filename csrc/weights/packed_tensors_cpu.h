// A quantized weight as an op on the CPU takes it. This header is torch-facing, and *_cpu.cpp alone include
// it.
#pragma once

#include "common/cpu_glue.h"
#include "weights/packed_weight_cpu.h"
#include "weights/packed_weight_glue.h"

namespace hf_fastpath {

// The tensors of a weight, contiguous; they have to live until the call is done.
struct PackedTensors {
  Tensor quants, scales;
  std::optional<Tensor> zeros;

  PackedTensors(const Tensor& raw_quants, const Tensor& raw_scales, const std::optional<Tensor>& raw_zeros)
      : quants(hf_fastpath::contiguous(raw_quants)), scales(hf_fastpath::contiguous(raw_scales)) {
    if (raw_zeros.has_value()) zeros = hf_fastpath::contiguous(*raw_zeros);
  }

  // The weight, once it is checked that it has `in_features`.
  PackedWeight weight(int64_t in_features, double multiplier, int64_t format, const char* op) const {
    const PackedShape shape = check_packed(in_features, quants, scales, zeros, format, op);
    PackedWeight weight{};
    weight.format = shape.format, weight.out_features = shape.rows, weight.blocks = shape.blocks;
    weight.groups = shape.groups;
    weight.quants = static_cast<const uint8_t*>(quants.const_data_ptr());
    weight.scales = scales.const_data_ptr();
    weight.zeros = zeros.has_value() ? static_cast<const uint8_t*>(zeros->const_data_ptr()) : nullptr;
    weight.multiplier = static_cast<float>(multiplier);
    return weight;
  }
};

// How many parts its outputs are worth dividing into.
inline int64_t output_parts(const PackedWeight& weight) {
  return std::min(part_count(weight.out_features * weight.output_bytes(), kBytesPerPart),
                  weight.out_features);
}

// What makes rows of it in `dtype`.
inline DequantizePacked* dequantizer(const PackedWeight& weight, DType dtype) {
  if (!use_avx2() || !has_kernels(weight.format)) return dequantize_packed_portable;
  return use_bf16_products() && dtype != DType::kFloat32 ? dequantize_packed_avx512_bf16
                                                         : dequantize_packed_avx2;
}

}  // namespace hf_fastpath
