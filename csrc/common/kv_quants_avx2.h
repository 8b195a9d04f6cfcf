// Quantized keys and values in AVX2: element types as in avx2_math.h, and the quantization of a head.
// Only *_avx2.cpp and *_avx512.cpp include this header; linkage is internal, throughout.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/avx2_math.h"

namespace hf_fastpath {
namespace {

// One struct per type of quants: `load` dequantizes eight to float32, as `kUnit` times what they stand for.
struct I8 {
  using Storage = int8_t;
  static constexpr float kUnit = 1.0f, kMost = kLargestInt8;
  HF_INLINE __m256 load(const int8_t* from) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  // Eight quants of values of at most 127, as 32-bit integers.
  HF_INLINE __m256i narrow(__m256 value) { return _mm256_cvtps_epi32(value); }
};

struct F8 {
  using Storage = uint8_t;
  static constexpr float kUnit = 0x1p-8f, kMost = kLargestFloat8;
  // Sign, exponent and mantissa as float16 has them, whose exponent's bias is 8 more.
  HF_INLINE __m128i halves(__m128i bytes) {
    return _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7), _mm_set1_epi16(short(0xbfff)));
  }
  HF_INLINE __m256 load(const uint8_t* from) {
    return _mm256_cvtph_ps(halves(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  // Eight quants of values of at most 448, rounded as from_float of kv_quants.h does.
  HF_INLINE __m256i narrow(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256 offset = _mm256_set1_ps(16384.0f);
    const __m256i small =
        _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(magnitude), offset)),
                         _mm256_castps_si256(offset));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_sub_epi32(magnitude, _mm256_set1_epi32(0x3c000000 - 0x7ffff)), odd);
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), magnitude);
    return _mm256_or_si256(sign, _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 20), small, is_small));
  }
};

template <class Kv>
inline constexpr bool kIsQuantized = std::is_same_v<Kv, I8> || std::is_same_v<Kv, F8>;

// Calls body(F32{} | F16{} | BF16{} | I8{} | F8{}).
template <class Body>
HF_INLINE void with_kv_element(KvType type, const Body& body) {
  switch (type) {
    case KvType::kInt8:
      return body(I8{});
    case KvType::kFloat8:
      return body(F8{});
    default:
      return with_element(static_cast<DType>(type), body);
  }
}

// Quantizes a head of a position. `values` are followed by zeros up to a multiple of eight.
template <class Kv>
HF_INLINE void quantize_head_avx2(const float* values, int64_t head_dim, typename Kv::Storage* quants,
                                  uint16_t* scale) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();  // magnitudes compare as their bits do, and NaN is the largest
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    most =
        _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(values + d)), magnitude));
  }
  __m128i top = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
  constexpr int kInfinity = 0x7f800000, kNaN = 0x7fc0;
  const __m128 step = _mm_div_ss(_mm_castsi128_ps(top), _mm_set_ss(Kv::kMost));
  const int rounded_up = (_mm_cvtsi128_si32(_mm_castps_si128(step)) + 0xffff) >> 16;
  const int bits = _mm_cvtsi128_si32(top) < kInfinity ? rounded_up : kNaN;
  *scale = static_cast<uint16_t>(bits);
  const __m256 divisor = _mm256_castsi256_ps(_mm256_set1_epi32(bits << 16));
  const __m256 is_positive = _mm256_cmp_ps(divisor, _mm256_setzero_ps(), _CMP_GT_OQ);  // neither 0 nor NaN
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    __m256 quotient = _mm256_and_ps(_mm256_div_ps(_mm256_loadu_ps(values + d), divisor), is_positive);
    quotient = _mm256_max_ps(_mm256_min_ps(quotient, _mm256_set1_ps(Kv::kMost)), _mm256_set1_ps(-Kv::kMost));
    // The lowest byte of every 32 bits.
    const __m256i bytes = _mm256_shuffle_epi8(Kv::narrow(quotient), _mm256_set1_epi32(0x0c080400));
    alignas(8) uint32_t words[2] = {static_cast<uint32_t>(_mm256_cvtsi256_si32(bytes)),
                                    static_cast<uint32_t>(_mm256_extract_epi32(bytes, 4))};
    const int64_t count = min_of(kLanes, head_dim - d);
    std::memcpy(quants + d, words, count);
  }
}

}  // namespace
}  // namespace hf_fastpath
