// What: out = activation(x @ W.T + bias) + residual, or activation(x @ W.T) * (x @ U.T), for 1 to 16 rows of
//   x, with the weight as nn.Linear stores it ([out, in]). Float32 sums, rounded once. gemv_linear.h has the
//   product, for vectors of 16 values here.
// Work split: as in gemv_avx2.cpp, with up to eight rows of x at a time.
// Traffic: the weight once.
// Roofline: read bandwidth up to four rows of x, then arithmetic. All matrices of TinyLlama one after the
// other,
//   two threads, Xeon with AMX, 2026-11, of a plain read of the same memory: 16-bit types 94 % for one to
//   four rows, 70 % for eight (200 GFLOP/s, a loop of FMAs reaches 404 to 426), float32 91 %.
#include <type_traits>

#include "gemv/gemv_linear.h"

namespace hf_fastpath {
namespace {

struct Vector16 {
  using Type = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kRows = 8;  // of x: 24 sums, three vectors of weights and one of x in 32 registers
  HF_INLINE Type zero() { return _mm512_setzero_ps(); }
  HF_INLINE Type load(const float* from) { return _mm512_loadu_ps(from); }
  template <class Element>
  HF_INLINE Type widen(__m256i bits) {
    if constexpr (std::is_same_v<Element, F16>) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  template <class Element>
  HF_INLINE Type weight(const typename Element::Storage* from) {
    if constexpr (std::is_same_v<Element, F32>)
      return _mm512_loadu_ps(from);
    else
      return widen<Element>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  // The first `count` < 16 values, zeros behind them.
  template <class Element>
  HF_INLINE Type weight(const typename Element::Storage* from, int64_t count) {
    const auto mask = static_cast<__mmask16>((1u << count) - 1);
    if constexpr (std::is_same_v<Element, F32>)
      return _mm512_maskz_loadu_ps(mask, from);
    else
      return widen<Element>(_mm256_maskz_loadu_epi16(mask, from));
  }
  HF_INLINE Type add(Type a, Type b) { return _mm512_add_ps(a, b); }
  HF_INLINE Type fma(Type a, Type b, Type c) { return _mm512_fmadd_ps(a, b, c); }
  HF_INLINE __m256 half(Type value) {
    return _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
  }
};

}  // namespace

void linear_avx512(const LinearArgs& args, int64_t begin, int64_t end) {
  linear_range<Vector16>(args, begin, end);
}

}  // namespace hf_fastpath
