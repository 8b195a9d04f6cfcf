// Values of a quantized weight one by one, for kernels of any CPU: included by *_cpu.cpp only.
#pragma once

#include "common/cpu_math.h"
#include "weights/packed_weight_cpu.h"

namespace hf_fastpath {

inline float fp8_to_float(uint8_t bits) {
  const float magnitude = to_float(Half{static_cast<uint16_t>((bits & 0x7f) << 7)}) * 256.0f;
  return bits & 0x80 ? -magnitude : magnitude;
}

// The weight at `place` of block b, but for the scale of its group and the multiplier.
inline float step_at(const PackedWeight& weight, int64_t n, int64_t b, int64_t place) {
  const uint8_t* quants =
      weight.quants + n * weight.row_bytes() + b * kPackedBlock * bits_of(weight.format) / 8;
  if (is_float(weight.format)) return fp8_to_float(quants[place]);
  if (bits_of(weight.format) == 8) return static_cast<float>(static_cast<int8_t>(quants[place]));
  const int quant = quants[place / 2] >> place % 2 * 4 & 15;
  if (has_table(weight.format)) return traits_of(weight.format).table[quant];
  const int zero =
      has_zeros(weight.format) ? weight.zeros[n * weight.groups + b] : traits_of(weight.format).zero;
  return static_cast<float>(quant - zero);
}

// With the scale.
inline float scaled_at(const PackedWeight& weight, int64_t n, int64_t b, int64_t place) {
  const int64_t group = group_of(weight.format, b, weight_at(weight.format, place) / kStretch);
  const int64_t at = n * weight.groups + group;
  const bool whole = traits_of(weight.format).scales == PackedScales::kFloat32;
  const float scale = whole ? static_cast<const float*>(weight.scales)[at]
                            : to_float(Half{static_cast<const uint16_t*>(weight.scales)[at]});
  return step_at(weight, n, b, place) * scale;
}

}  // namespace hf_fastpath
