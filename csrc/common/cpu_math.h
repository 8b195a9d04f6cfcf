// Scalar element conversions and activations for the portable CPU kernels: any x86-64, free of torch.
// Everything has internal linkage: an inline function with external linkage could be merged by the linker
// with a copy compiled for AVX2 and then fail on a CPU without it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"

namespace hf_fastpath {
namespace {

// Storage types that tell half and bfloat16 apart; both are 16 raw bits.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

[[maybe_unused]] inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

[[maybe_unused]] inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

[[maybe_unused]] inline float to_float(float value) { return value; }

[[maybe_unused]] inline float to_float(BFloat16 value) {
  return bits_to_float(static_cast<uint32_t>(value.bits) << 16);
}

[[maybe_unused]] inline float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u)
    return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // Inf, NaN
  // Scaling by a power of two moves the exponent bias and makes subnormals normal, exactly.
  const float scaled = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);  // * 2^112
  return bits_to_float(sign | float_to_bits(scaled));
}

[[maybe_unused]] inline void from_float(float value, float* out) { *out = value; }

[[maybe_unused]] inline void from_float(float value, BFloat16* out) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // rounding could carry a NaN over into infinity
    out->bits = static_cast<uint16_t>(bits >> 16 | 0x40u);
    return;
  }
  out->bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

[[maybe_unused]] inline void from_float(float value, Half* out) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // quiet NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal in half: adding 0.5 leaves the value, rounded to nearest even, in the low mantissa bits.
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

// Calls body with a null pointer of the storage type of `dtype`.
template <class Body>
inline void with_storage(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(static_cast<float*>(nullptr));
    case DType::kFloat16:
      return body(static_cast<Half*>(nullptr));
    case DType::kBFloat16:
      return body(static_cast<BFloat16*>(nullptr));
  }
}

// out[0..count) += residual, of what was rounded already: rounded again.
template <class T>
inline void add_row(const T* residual, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) from_float(to_float(out[i]) + to_float(residual[i]), out + i);
}

[[maybe_unused]] inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

// 0.5 * (1 + tanh(u)) equals 1 / (1 + exp(-2u)), which does not cancel for negative u.
[[maybe_unused]] inline float gelu_tanh(float x) {
  return x / (1.0f + std::exp(-x * (1.5957691216057308f + 0.07135481627260025f * x * x)));
}

[[maybe_unused]] inline float gelu_erf(float x) { return x * (0.5f * std::erfc(-0.70710678118654752f * x)); }

[[maybe_unused]] inline float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;  // NaN stays NaN
    case Activation::kSilu:
      return silu(x);
    case Activation::kGeluTanh:
      return gelu_tanh(x);
    case Activation::kGelu:
      return gelu_erf(x);
  }
  return x;
}

}  // namespace
}  // namespace hf_fastpath
