// Quantized keys and values on the device, as `quantized` of hf_fastpath/ops/kv_cache.py has them, bit for
// bit.
#pragma once

#include <type_traits>

#include "common/float8.cuh"
#include "common/numeric.cuh"

namespace hf_fastpath {

struct Float8 {  // e4m3: no infinity, the largest is 448
  uint8_t bits;
};

template <class KV>
constexpr bool kIsQuant = sizeof(KV) == 1;

// What dequantized quants are multiples of: 1 / kUnit makes them what they stand for.
template <class Quant>
constexpr float kQuantUnit = std::is_same_v<Quant, int8_t> ? 1.f : 0x1p-8f;

__device__ __forceinline__ float bfloat16_bits_to_float(uint16_t bits) {
  return __uint_as_float(uint32_t(bits) << 16);
}

// Eight quants, in one access. Members as those of Chunk.
template <class Quant>
struct QuantChunk {
  using Raw = uint2;
  static constexpr int kElems = 8;
  static __device__ __forceinline__ Raw zero() { return make_uint2(0, 0); }
  static __device__ __forceinline__ Raw load_streaming_l2(const Quant* p) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(p));
    return v;
  }
  static __device__ __forceinline__ void unpack(const Raw& raw, float (&f)[kElems]) {
    const uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      if constexpr (std::is_same_v<Quant, int8_t>) {
        // A byte as the last of a float32 of 2^23: fewer cycles than a conversion takes.
        const uint32_t raised = words[w] ^ 0x80808080u;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          f[4 * w + i] = __uint_as_float(__byte_perm(raised, 0x4b000000u, 0x7440 + i)) - (0x1p23f + 128.f);
      } else {
        const float2 lower = unpack2(halves_of_float8<false>(words[w]), __half());
        const float2 upper = unpack2(halves_of_float8<true>(words[w]), __half());
        f[4 * w] = lower.x, f[4 * w + 1] = lower.y, f[4 * w + 2] = upper.x, f[4 * w + 3] = upper.y;
      }
    }
  }
};

// Two bytes of a word as the low bytes of 16-bit values whose high bytes are those of `high`.
template <bool kUpper>
__device__ __forceinline__ uint32_t spread_bytes(uint32_t bytes, uint32_t high) {
  return __byte_perm(bytes, high, kUpper ? 0x4342 : 0x4140);
}

// A head's scale, as bfloat16, out of the bits of its largest magnitude; NaN if that is not finite.
__device__ __forceinline__ uint16_t quant_scale(uint32_t largest, float largest_quant) {
  constexpr uint32_t kInfinity = 0x7f800000u, kNaN = 0x7fc0u;
  if (largest >= kInfinity) return kNaN;
  return (__float_as_uint(__fdiv_rn(__uint_as_float(largest), largest_quant)) + 0xffffu) >> 16;
}

// value / scale as __fdiv_rn has it, for many values: two steps behind the reciprocal are exact, but for
// numbers near the ends of float32's range, where it divides.
class Divisor {
 public:
  __device__ __forceinline__ explicit Divisor(float scale) {
    scale_ = scale, inverse_ = __frcp_rn(scale), steps_ = scale > 0x1p-80f && scale < 0x1p80f;
  }
  __device__ __forceinline__ float operator()(float value) const {
    if (!steps_) return scale_ > 0.f ? __fdiv_rn(value, scale_) : 0.f;
    const float near = value * inverse_;
    return fmaf(fmaf(-near, scale_, value), inverse_, near);
  }

 private:
  float scale_, inverse_;
  bool steps_;
};

// The quant nearest to `value`, ties to even, of a scale as quant_scale gives it.
template <class Quant>
__device__ __forceinline__ uint8_t quantize(float value, const Divisor& scale) {
  constexpr float kMost = std::is_same_v<Quant, int8_t> ? kLargestInt8 : kLargestFloat8;
  float x = scale(value);
  x = fminf(fmaxf(x, -kMost), kMost);
  if constexpr (std::is_same_v<Quant, int8_t>) return static_cast<uint8_t>(__float2int_rn(x));
  const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  // Below 2^-6, subnormal: adding 2^14 leaves the value, rounded to 2^-9, in the low mantissa bits.
  const uint32_t small = __float_as_uint(__uint_as_float(magnitude) + 16384.f) - __float_as_uint(16384.f);
  const uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  return static_cast<uint8_t>(sign | (magnitude < 0x3c800000u ? small : normal));
}

// Calls `f` with a value of the C++ type that `type` names.
template <class F>
void with_kv_type(KvType type, F&& f) {
  if (type == KvType::kInt8) return f(int8_t());
  if (type == KvType::kFloat8) return f(Float8());
  with_type(static_cast<DType>(type), f);
}

}  // namespace hf_fastpath
