// Values of quants and of scales, one by one and of any format: for the kernels that read every format, on
// the CPU and on a GPU. A further kind of quants or of scales has its case here. Linkage is internal, as in
// cpu_math.h.
#pragma once

#include <cstdint>

#include "weights/packed_format.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define HF_VALUE __device__ __forceinline__
#else
#include "common/cpu_math.h"
#define HF_VALUE [[maybe_unused]] inline
#endif

namespace hf_fastpath {
namespace {

HF_VALUE float half_value(uint16_t bits) {
#ifdef __CUDACC__
  return __half2float(__ushort_as_half(bits));
#else
  return to_float(Half{bits});
#endif
}

// 2^(byte - 127), infinite of 255.
HF_VALUE float power_value(uint32_t byte) {
  const uint32_t bits = byte != 0 ? byte << 23 : 0x00400000u;
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// Whether quants are signed: those of 8 bits without zero points of groups.
HF_VALUE bool is_signed(const PackedTraits& traits) {
  return traits.bits == 8 && traits.zeros != PackedZeros::kOfGroup;
}

// The value of a quant in units of its scale, but for a zero point of its group.
HF_VALUE float quant_value(const PackedTraits& traits, uint32_t quant) {
  switch (traits.values) {
    case PackedValues::kIntegers:
      return static_cast<float>(is_signed(traits) ? static_cast<int>(static_cast<int8_t>(quant))
                                                  : static_cast<int>(quant) - traits.zero);
    case PackedValues::kFloats: {  // bits of e4m3 are those of a float16 that is 2^-8 of the value
      const float magnitude = half_value(static_cast<uint16_t>((quant & 0x7f) << 7)) * 256.0f;
      return quant & 0x80 ? -magnitude : magnitude;
    }
    case PackedValues::kTable:
      return traits.table[quant];
  }
  return 0.0f;  // there are no others
}

// The scale at a place.
HF_VALUE float scale_value(const PackedTraits& traits, const void* scales, int64_t place) {
  switch (traits.scales) {
    case PackedScales::kFloat16:
      return half_value(static_cast<const uint16_t*>(scales)[place]);
    case PackedScales::kFloat32:
      return static_cast<const float*>(scales)[place];
    case PackedScales::kE8m0:
      return power_value(static_cast<const uint8_t*>(scales)[place]);
    default:
      return 0.0f;  // records have no scale at a place
  }
}

HF_VALUE float half_at(const uint8_t* from) {
  return half_value(static_cast<uint16_t>(from[0] | from[1] << 8));
}

// A weight is scale * quant + minimum.
struct PackedFactors {
  float scale, minimum;
};

// Those of the weight at `place` among the weights of a block, in order, of the block's record.
HF_VALUE PackedFactors record_factors(const PackedTraits& traits, const uint8_t* record, int place) {
  const int group = place / static_cast<int>(traits.group);
  switch (traits.scales) {
    case PackedScales::kMinimums:
      return {half_at(record + 4 * group), half_at(record + 4 * group + 2)};
    case PackedScales::kFloatZeros: {
      const float scale = half_at(record + 4 * group);
      return {scale, -scale * half_at(record + 4 * group + 2)};  // exact
    }
    case PackedScales::kMiddles: {
      const float scale = half_at(record + 4 * group);
      return {scale, half_at(record + 4 * group + 2) - 8.0f * scale};
    }
    case PackedScales::kKMinimums:
      return {half_at(record) * static_cast<float>(record[4 + group]),
              -half_at(record + 2) * static_cast<float>(record[8 + group])};
    case PackedScales::kKScales:
      return {
          half_at(record) * static_cast<float>(static_cast<int8_t>(record[4 + group % 2 * 4 + group / 2])),
          0.0f};
    default:
      return {0.0f, 0.0f};  // others have no records
  }
}

}  // namespace
}  // namespace hf_fastpath
