// Weights of a quantized matrix one by one, for kernels of any CPU: included by *_cpu.cpp only.
#pragma once

#include "weights/packed_values.h"
#include "weights/packed_weight_cpu.h"

namespace hf_fastpath {

// The weight at `place` of block b, but for the multiplier.
inline float scaled_at(const PackedWeight& weight, int64_t n, int64_t b, int64_t place) {
  const PackedTraits& traits = traits_of(weight.format);
  const uint8_t* quants = weight.quants + n * weight.row_bytes() + b * kPackedBlock * traits.bits / 8;
  const uint32_t quant = traits.bits == 8 ? quants[place] : quants[place / 2] >> place % 2 * 4 & 15;
  const int64_t in_order = weight_at(weight.format, place), sub_block = in_order / kSubBlock;
  if (traits.record_bytes > 0) {
    const auto* records = static_cast<const uint8_t*>(weight.scales) + n * weight.groups;
    const PackedFactors of =
        record_factors(traits, records + b * traits.record_bytes, static_cast<int>(in_order));
    return quant_value(traits, quant) * of.scale + of.minimum;
  }
  const int64_t group = n * weight.groups + group_of(weight.format, b, sub_block);
  float value = quant_value(traits, quant);
  if (traits.zeros == PackedZeros::kOfGroup) value -= weight.zeros[group];
  return value * scale_value(traits, weight.scales, group);
}

}  // namespace hf_fastpath
