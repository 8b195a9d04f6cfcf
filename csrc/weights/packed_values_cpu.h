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
  const int64_t sub_block = weight_at(weight.format, place) / kSubBlock;
  const int64_t group = n * weight.groups + group_of(weight.format, b, sub_block);
  float value = quant_value(traits, quant);
  if (traits.zeros == PackedZeros::kOfGroup) value -= weight.zeros[group];
  return value * scale_value(traits, weight.scales, group);
}

}  // namespace hf_fastpath
