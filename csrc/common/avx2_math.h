// Eight-lane float32 building blocks of the AVX2 kernels: loads and stores that convert, exp and activations.
// Only *_avx2.cpp include this header. Internal linkage throughout: no AVX2 code may leak into a function
// that the linker could also pick for the portable path.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/cpu_features.h"
#include "common/dtype.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kLanes = 8;  // float32 values in a 256-bit register
constexpr int64_t kCacheLineBytes = 64;

#define HF_INLINE [[maybe_unused]] static inline __attribute__((always_inline))

HF_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Bytes ahead in a stream that a kernel asks for what it will read, at most `most` of them.
HF_INLINE int64_t read_ahead_bytes(int64_t most = 2048) { return min_of(cpu_tuning().prefetch_bytes, most); }

HF_INLINE float half_to_float(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }

// Copies `count` 16-bit values (1 to 7) into a zeroed register without touching what lies behind them.
HF_INLINE __m128i load_partial_16(const uint16_t* from, int64_t count) {
  alignas(16) uint16_t buffer[8] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = from[i];
  return _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
}

HF_INLINE void store_partial_16(uint16_t* to, __m128i value, int64_t count) {
  alignas(16) uint16_t buffer[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(buffer), value);
  for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
}

HF_INLINE __m256i lane_mask(int64_t count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
}

// One struct per element type: load, store, and both for the first `count` < 8 lanes (the rest reads as
// zero).
struct F32 {
  using Storage = float;
  HF_INLINE __m256 load(const float* from) { return _mm256_loadu_ps(from); }
  HF_INLINE __m256 load(const float* from, int64_t count) {
    return _mm256_maskload_ps(from, lane_mask(count));
  }
  HF_INLINE void store(float* to, __m256 value) { _mm256_storeu_ps(to, value); }
  HF_INLINE void store(float* to, __m256 value, int64_t count) {
    _mm256_maskstore_ps(to, lane_mask(count), value);
  }
};

struct F16 {
  using Storage = uint16_t;
  HF_INLINE __m256 widen(__m128i bits) { return _mm256_cvtph_ps(bits); }
  HF_INLINE __m256 load(const uint16_t* from) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  HF_INLINE __m256 load(const uint16_t* from, int64_t count) { return widen(load_partial_16(from, count)); }
  HF_INLINE void store(uint16_t* to, __m256 value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
  HF_INLINE void store(uint16_t* to, __m256 value, int64_t count) {
    store_partial_16(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT), count);
  }
};

struct BF16 {
  using Storage = uint16_t;
  HF_INLINE __m256 widen(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  // Round to nearest even; NaNs become quiet NaNs instead of being carried into infinity.
  HF_INLINE __m128i narrow(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  }
  HF_INLINE __m256 load(const uint16_t* from) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  HF_INLINE __m256 load(const uint16_t* from, int64_t count) { return widen(load_partial_16(from, count)); }
  HF_INLINE void store(uint16_t* to, __m256 value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow(value));
  }
  HF_INLINE void store(uint16_t* to, __m256 value, int64_t count) {
    store_partial_16(to, narrow(value), count);
  }
};

// Calls body(F32{} | F16{} | BF16{}).
template <class Body>
HF_INLINE void with_element(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(F32{});
    case DType::kFloat16:
      return body(F16{});
    case DType::kBFloat16:
      return body(BF16{});
  }
}

// A vector of eight float32: the base of what blocked kernels take as their Vector.
struct Floats8 {
  using Type = __m256;   // of sums,
  using Operand = Type;  // of what is multiplied,
  using Input = float;   // and of a row of x in memory
  static constexpr int kWidth = 8;
  HF_INLINE Type zero() { return _mm256_setzero_ps(); }
  HF_INLINE Type set(float value) { return _mm256_set1_ps(value); }
  HF_INLINE Type broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  HF_INLINE Type load(const float* from) { return _mm256_loadu_ps(from); }
  template <class Element>
  HF_INLINE Type load(const typename Element::Storage* from) {
    return Element::load(from);
  }
  // The first `count` < kWidth values, zeros behind them.
  template <class Element>
  HF_INLINE Type load(const typename Element::Storage* from, int64_t count) {
    return Element::load(from, count);
  }
  HF_INLINE void store(float* to, Type value) { _mm256_storeu_ps(to, value); }
  HF_INLINE Type add(Type a, Type b) { return _mm256_add_ps(a, b); }
  HF_INLINE Type mul(Type a, Type b) { return _mm256_mul_ps(a, b); }
  HF_INLINE Type fma(Type a, Type b, Type c) { return _mm256_fmadd_ps(a, b, c); }
  // The values added up to eight.
  HF_INLINE __m256 half(Type value) { return value; }
};

HF_INLINE float horizontal_sum(__m256 v) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

HF_INLINE float horizontal_max(__m256 v) {
  __m128 top = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  top = _mm_max_ps(top, _mm_movehl_ps(top, top));
  return _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
}

// exp(x), within about one unit in the last place; 0 below -104, infinity above 88.73, NaN stays NaN.
HF_INLINE __m256 exp_ps(__m256 x) {
  // min/max return their second operand for NaN, so x goes second.
  x = _mm256_min_ps(_mm256_set1_ps(89.0f), x);
  x = _mm256_max_ps(_mm256_set1_ps(-104.0f), x);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // x - n ln 2, with ln 2 in two parts of which the first has trailing zero bits: exact to the last place.
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.62e4p-1f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.7f7d1cp-20f), r);
  // (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2: minimax fit, relative error of exp 3e-9.
  __m256 p = _mm256_set1_ps(0x1.6a2350p-10f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.123a6cp-7f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.5558f4p-5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.555490p-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.fffffcp-2f));
  p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(r, r), p, r), _mm256_set1_ps(1.0f));
  // Times 2^n in two steps: n reaches from -150 (subnormal results) to 128, more than one exponent holds.
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}

// tanh(x), within a few units in the last place.
HF_INLINE __m256 tanh_ps(__m256 x) {
  const __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f)), size = _mm256_xor_ps(x, sign);
  const __m256 one = _mm256_set1_ps(1.0f), two = _mm256_set1_ps(2.0f);
  const __m256 far =
      _mm256_sub_ps(one, _mm256_div_ps(two, _mm256_add_ps(one, exp_ps(_mm256_add_ps(size, size)))));
  // Near zero that cancels; there the Taylor series to x^13, whose next term is below 2e-9 of the result.
  const __m256 square = _mm256_mul_ps(size, size);
  __m256 p = _mm256_set1_ps(21844.0f / 6081075.0f);
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(-1382.0f / 155925.0f));
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(62.0f / 2835.0f));
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(-17.0f / 315.0f));
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(2.0f / 15.0f));
  p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(-1.0f / 3.0f));
  const __m256 near = _mm256_fmadd_ps(_mm256_mul_ps(p, square), size, size);
  const __m256 is_near = _mm256_cmp_ps(size, _mm256_set1_ps(0.35f), _CMP_LT_OQ);
  return _mm256_or_ps(_mm256_blendv_ps(far, near, is_near), sign);
}

HF_INLINE __m256 negated(__m256 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }

// x / (1 + exp(-z)).
HF_INLINE __m256 times_sigmoid(__m256 x, __m256 z) {
  return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), exp_ps(negated(z))));
}

HF_INLINE __m256 silu_ps(__m256 x) { return times_sigmoid(x, x); }

// 0.5 (1 + tanh(u)) is the logistic function of 2u = x (2 sqrt(2/pi) + 0.044715 * 2 sqrt(2/pi) x^2): one exp
// and no cancellation where tanh nears -1.
HF_INLINE __m256 gelu_tanh_ps(__m256 x) {
  const __m256 cubic = _mm256_mul_ps(_mm256_set1_ps(0.07135481627260025f), _mm256_mul_ps(x, x));
  return times_sigmoid(x, _mm256_mul_ps(x, _mm256_add_ps(_mm256_set1_ps(1.5957691216057308f), cubic)));
}

// x * Phi(x), Phi the normal distribution. With t = |x|: Phi(-t) = exp(-t^2/2) * q(s), s = 1 / (1 + t/4),
// where q is a minimax polynomial for 0 <= t <= 14 with relative error 1.4e-8; Phi(t) = 1 - Phi(-t).
HF_INLINE __m256 gelu_erf_ps(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 t = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
  const __m256 s = _mm256_div_ps(one, _mm256_fmadd_ps(t, _mm256_set1_ps(0.25f), one));
  __m256 q = _mm256_set1_ps(0.0339466849f);
  q = _mm256_fmadd_ps(q, s, _mm256_set1_ps(-0.196177127f));
  q = _mm256_fmadd_ps(q, s, _mm256_set1_ps(0.395000995f));
  q = _mm256_fmadd_ps(q, s, _mm256_set1_ps(-0.333468694f));
  q = _mm256_fmadd_ps(q, s, _mm256_set1_ps(0.304486435f));
  q = _mm256_fmadd_ps(q, s, _mm256_set1_ps(-0.0203838269f));
  q = _mm256_fmadd_ps(q, s, _mm256_set1_ps(0.121567863f));
  q = _mm256_fmadd_ps(q, s, _mm256_set1_ps(0.0948202671f));
  q = _mm256_fmadd_ps(q, s, _mm256_set1_ps(0.100228997f));
  q = _mm256_fmadd_ps(q, s, _mm256_set1_ps(-2.15999974e-5f));
  const __m256 tail = _mm256_mul_ps(q, exp_ps(_mm256_mul_ps(_mm256_set1_ps(-0.5f), _mm256_mul_ps(t, t))));
  const __m256 phi = _mm256_blendv_ps(_mm256_sub_ps(one, tail), tail, x);  // by the sign of x
  return _mm256_mul_ps(x, phi);
}

template <Activation kActivation>
HF_INLINE __m256 activate_ps(__m256 x) {
  if constexpr (kActivation == Activation::kRelu) return _mm256_max_ps(_mm256_setzero_ps(), x);  // NaN stays
  if constexpr (kActivation == Activation::kSilu) return silu_ps(x);
  if constexpr (kActivation == Activation::kGeluTanh) return gelu_tanh_ps(x);
  if constexpr (kActivation == Activation::kGelu) return gelu_erf_ps(x);
  return x;
}

template <Activation kValue>
struct ActivationTag {
  static constexpr Activation value = kValue;
};

template <class Body>
HF_INLINE void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::kNone:
      return body(ActivationTag<Activation::kNone>{});
    case Activation::kRelu:
      return body(ActivationTag<Activation::kRelu>{});
    case Activation::kSilu:
      return body(ActivationTag<Activation::kSilu>{});
    case Activation::kGeluTanh:
      return body(ActivationTag<Activation::kGeluTanh>{});
    case Activation::kGelu:
      return body(ActivationTag<Activation::kGelu>{});
  }
}

}  // namespace
}  // namespace hf_fastpath
