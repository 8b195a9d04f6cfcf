// Quantized keys and values for the portable CPU kernels, bit for bit as `quantized` of
// hf_fastpath/ops/kv_cache.py has them. Free of torch; internal linkage as in cpu_math.h.
#pragma once

#include <type_traits>

#include "common/cpu_math.h"

namespace hf_fastpath {
namespace {

struct Float8 {  // e4m3: no infinity, the largest is 448
  uint8_t bits;
};

template <class Quant>
constexpr bool kIsQuant = std::is_same_v<Quant, int8_t> || std::is_same_v<Quant, Float8>;

[[maybe_unused]] inline float to_float(int8_t value) { return value; }

[[maybe_unused]] inline float to_float(Float8 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80u) << 24, magnitude = value.bits & 0x7fu;
  // Scaling by a power of two moves the exponent bias and makes subnormals normal, exactly.
  const float scaled = bits_to_float(magnitude << 20) * bits_to_float(0x7b800000u);  // * 2^120
  return bits_to_float(sign | float_to_bits(scaled));
}

// Both round to the nearest, ties to even, a value of at most the largest quant.
[[maybe_unused]] inline void from_float(float value, int8_t* out) {
  *out = static_cast<int8_t>(std::nearbyint(value));
}

[[maybe_unused]] inline void from_float(float value, Float8* out) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  uint32_t quant;
  if (magnitude < 0x3c800000u) {
    // Below 2^-6, subnormal: adding 2^14 leaves the value, rounded to 2^-9, in the low mantissa bits.
    quant = float_to_bits(bits_to_float(magnitude) + 16384.0f) - float_to_bits(16384.0f);
  } else {
    quant = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  }
  out->bits = static_cast<uint8_t>(sign | quant);
}

// Quantizes a head of a position.
template <class Quant>
inline void quantize_head(const float* values, int64_t head_dim, Quant* quants, uint16_t* scale) {
  constexpr float kMost = std::is_same_v<Quant, int8_t> ? kLargestInt8 : kLargestFloat8;
  constexpr uint32_t kInfinity = 0x7f800000u;
  constexpr uint16_t kNaN = 0x7fc0u;
  uint32_t largest = 0;  // magnitudes compare as their bits do, and NaN is the largest
  for (int64_t d = 0; d < head_dim; ++d) {
    const uint32_t magnitude = float_to_bits(values[d]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const uint32_t rounded_up = (float_to_bits(bits_to_float(largest) / kMost) + 0xffffu) >> 16;
  *scale = largest < kInfinity ? static_cast<uint16_t>(rounded_up) : kNaN;
  const float divisor = to_float(BFloat16{*scale});
  for (int64_t d = 0; d < head_dim; ++d) {
    const float quotient = divisor > 0.0f ? values[d] / divisor : 0.0f;
    from_float(quotient < -kMost ? -kMost : quotient > kMost ? kMost : quotient, quants + d);
  }
}

// Calls body with a null pointer of the storage type of `type`.
template <class Body>
inline void with_kv_storage(KvType type, const Body& body) {
  switch (type) {
    case KvType::kInt8:
      return body(static_cast<int8_t*>(nullptr));
    case KvType::kFloat8:
      return body(static_cast<Float8*>(nullptr));
    default:
      return with_storage(static_cast<DType>(type), body);
  }
}

}  // namespace
}  // namespace hf_fastpath
