// Sixteen float32 as avx2_math.h has eight. Only *_avx512.cpp and *_avx512_vnni.cpp include this header;
// linkage is internal, as there.
#pragma once

#include <type_traits>

#include "common/avx2_math.h"

namespace hf_fastpath {
namespace {

// The first `count` of 32.
HF_INLINE __mmask32 first_of_32(int64_t count) {
  return count <= 0 ? 0 : count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
}

// The line of `from` into the second-level cache.
HF_INLINE void prefetch(const void* from) { _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T1); }

// Floats8's counterpart.
struct Floats16 {
  using Type = __m512;
  using Operand = Type;
  using Input = float;
  static constexpr int kWidth = 16;
  HF_INLINE Type zero() { return _mm512_setzero_ps(); }
  HF_INLINE Type set(float value) { return _mm512_set1_ps(value); }
  HF_INLINE Type broadcast(const float* from) { return _mm512_set1_ps(*from); }
  HF_INLINE Type load(const float* from) { return _mm512_loadu_ps(from); }
  template <class Element>
  HF_INLINE Type load(const typename Element::Storage* from) {
    if constexpr (std::is_same_v<Element, F32>) {
      return _mm512_loadu_ps(from);
    } else {
      return widen<Element>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
  }
  // The first `count` < kWidth values, zeros behind them.
  template <class Element>
  HF_INLINE Type load(const typename Element::Storage* from, int64_t count) {
    const auto mask = static_cast<__mmask16>((1u << count) - 1);
    if constexpr (std::is_same_v<Element, F32>) {
      return _mm512_maskz_loadu_ps(mask, from);
    } else {
      return widen<Element>(_mm256_maskz_loadu_epi16(mask, from));
    }
  }
  HF_INLINE void store(float* to, Type value) { _mm512_storeu_ps(to, value); }
  HF_INLINE Type add(Type a, Type b) { return _mm512_add_ps(a, b); }
  HF_INLINE Type mul(Type a, Type b) { return _mm512_mul_ps(a, b); }
  HF_INLINE Type fma(Type a, Type b, Type c) { return _mm512_fmadd_ps(a, b, c); }
  // The values added up to eight.
  HF_INLINE __m256 half(Type value) {
    return _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
  }

 private:
  template <class Element>
  HF_INLINE Type widen(__m256i bits) {
    if constexpr (std::is_same_v<Element, F16>) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
};

}  // namespace
}  // namespace hf_fastpath
