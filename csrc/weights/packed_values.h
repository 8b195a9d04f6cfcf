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
  }
  return 0.0f;  // there are no others
}

}  // namespace
}  // namespace hf_fastpath
