// What: rows of a weight of 4 or 8 bits as float16 or bfloat16, in order, for products of many rows of x
//   (gemm/gemm_cpu.cpp).
// Work split: the caller's threads take ranges of rows; 32 weights of a stretch are written at a time. int8
//   is brought to where it is converted by one shuffle of bytes; quants of four bits, and e4m3 but for its
//   sign, look their values up in tables of 16 and 128, made for every scale.
// Traffic: quants and scales once; what is written stays in a second-level cache.
// Roofline: instructions, eight to ten for 32 weights.
#include <algorithm>

#include "common/avx512_math.h"
#include "packed_gemv/packed_gemv_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int kWords = 32;  // 16-bit words of a vector

// 32 values, rounded to 16 bits.
template <class Element>
HF_INLINE __m512i rounded(__m512 low, __m512 high) {
  if constexpr (std::is_same_v<Element, BF16>) {
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    __m512i bits;
    __builtin_memcpy(&bits, &both, sizeof bits);
    return bits;
  } else {
    const __m256i first = _mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i second = _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }
}

HF_INLINE __m512 steps_from(float first) {
  const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_ps(steps, _mm512_set1_ps(first));
}

// ---- quants of four bits: a table of 16 values, twice, for a scale ----

template <class Element>
HF_INLINE __m512i nibble_values(float scale, int zero) {
  const __m512 values = _mm512_mul_ps(steps_from(float(-zero)), _mm512_set1_ps(scale));
  return rounded<Element>(values, values);
}

// Byte b of stretch s's words becomes both halves of the dword that its two weights are written to.
HF_INLINE __m512i nibble_places(int s) {
  const __m128i lane = _mm_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1);
  const __m128i moved = _mm_add_epi8(
      lane, _mm_and_si128(_mm_cmpgt_epi8(lane, _mm_set1_epi8(-1)), _mm_set1_epi8(static_cast<char>(4 * s))));
  return _mm512_broadcast_i32x4(moved);
}

template <class Storage>
HF_INLINE void widen_nibbles(const uint8_t* quants, const __m512i (&values)[kStretches], Storage* to) {
  const __m512i both = _mm512_loadu_si512(quants);
#pragma GCC unroll 4
  for (int s = 0; s < int(kStretches); ++s) {
    // Only the lowest five bits of a word count, of which the fifth chooses between equal halves.
    const __m512i bytes = _mm512_shuffle_epi8(both, nibble_places(s));
    const __m512i places = _mm512_srlv_epi16(bytes, _mm512_set1_epi32(4 << 16));
    _mm512_storeu_si512(to + s * kStretch, _mm512_permutexvar_epi16(places, values[s]));
  }
}

// ---- int8 ----

template <class Element>
HF_INLINE void widen_bytes(const uint8_t* quants, float scale, typename Element::Storage* to) {
  const __m512 unit = _mm512_set1_ps(scale * 0x1p-24f);  // a quant lies in the upper byte of 32 bits
  const __m512i first = _mm512_loadu_si512(quants), second = _mm512_loadu_si512(quants + 64);
#pragma GCC unroll 4
  for (int s = 0; s < int(kStretches); ++s) {
    const __m128i lane =
        _mm_setr_epi8(-1, -1, -1, 4 * s, -1, -1, -1, 4 * s + 1, -1, -1, -1, 4 * s + 2, -1, -1, -1, 4 * s + 3);
    const __m512i places = _mm512_broadcast_i32x4(lane);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_shuffle_epi8(first, places));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_shuffle_epi8(second, places));
    _mm512_storeu_si512(to + s * kStretch,
                        rounded<Element>(_mm512_mul_ps(low, unit), _mm512_mul_ps(high, unit)));
  }
}

// ---- fp8: a table of the 128 values that are not negative ----

struct Fp8Values {
  __m512i words[4];
};

template <class Element>
HF_INLINE Fp8Values fp8_values(float scale) {
  const __m512 unit = _mm512_set1_ps(scale * 256.0f);  // of float16's bits that are 2^-8 of the value
  Fp8Values values;
  for (int i = 0; i < 4; ++i) {
    alignas(64) uint16_t halves[kWords];
    for (int j = 0; j < kWords; ++j) halves[j] = static_cast<uint16_t>((i * kWords + j) << 7);
    const __m512i bits = _mm512_load_si512(halves);
    values.words[i] =
        rounded<Element>(_mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), unit),
                         _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1)), unit));
  }
  return values;
}

template <class Storage>
HF_INLINE void widen_fp8(const uint8_t* quants, const Fp8Values& values, Storage* to) {
  const __m512i first = _mm512_loadu_si512(quants), second = _mm512_loadu_si512(quants + 64);
#pragma GCC unroll 2
  for (int pair = 0; pair < int(kStretches) / 2; ++pair) {  // of stretches
    const __m512i words =
        _mm512_add_epi32(_mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29),
                         _mm512_set1_epi32(2 * pair));
    const __m512i bytes = _mm512_permutex2var_epi32(first, words, second);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i places = _mm512_cvtepu8_epi16(half == 0 ? _mm512_castsi512_si256(bytes)
                                                            : _mm512_extracti64x4_epi64(bytes, 1));
      const __m512i low = _mm512_permutex2var_epi16(values.words[0], places, values.words[1]);
      const __m512i high = _mm512_permutex2var_epi16(values.words[2], places, values.words[3]);
      const __mmask32 is_high = _mm512_test_epi16_mask(places, _mm512_set1_epi16(64));
      const __m512i magnitude = _mm512_mask_blend_epi16(is_high, low, high);
      const __m512i negative = _mm512_slli_epi16(places, 8);
      _mm512_storeu_si512(to + (2 * pair + half) * kStretch,
                          _mm512_ternarylogic_epi32(magnitude, negative,
                                                    _mm512_set1_epi16(static_cast<short>(0x8000)), 0xf8));
    }
  }
}

template <PackedForm kForm, class Element>
void widen_rows(const PackedArgs& weight, int64_t in_features, int64_t begin, int64_t end,
                typename Element::Storage* to) {
  using Storage = typename Element::Storage;
  constexpr int64_t kBytes = kPackedBlock * bits_of(kForm) / 8;
  alignas(64) Storage last[kPackedBlock];
  for (int64_t n = begin; n < end; ++n) {
    const uint8_t* quants = weight.quants + n * weight.row_bytes();
    const uint16_t* scales = weight.scales + n * weight.groups;
    const auto scale = [&](int64_t group) { return _cvtsh_ss(scales[group]) * weight.multiplier; };
    Fp8Values row_values;
    if constexpr (kForm == PackedForm::kFp8) row_values = fp8_values<Element>(scale(0));
    for (int64_t b = 0; b < weight.blocks; ++b, quants += kBytes) {
      const int64_t count = std::min(kPackedBlock, in_features - b * kPackedBlock);
      Storage* const block = count == kPackedBlock ? to : last;
      if constexpr (kForm == PackedForm::kInt8) {
        widen_bytes<Element>(quants, scale(b), block);
      } else if constexpr (kForm == PackedForm::kFp8) {
        widen_fp8(quants, row_values, block);
      } else {
        __m512i values[kStretches];
#pragma GCC unroll 4
        for (int s = 0; s < int(kStretches); ++s) {
          if constexpr (kForm == PackedForm::kInt4G32) {
            values[s] = nibble_values<Element>(scale(b * kStretches + s), 8);
          } else {
            values[s] =
                s > 0 ? values[0] : nibble_values<Element>(scale(b), weight.zeros[n * weight.groups + b]);
          }
        }
        widen_nibbles(quants, values, block);
      }
      if (block == last) std::copy_n(last, count, to);
      to += count;
    }
  }
}

}  // namespace

void widen_packed_avx512_bf16(const PackedArgs& weight, int64_t in_features, DType dtype, int64_t begin,
                              int64_t end, void* to) {
  const auto widen = [&](auto element) {
    using Element = decltype(element);
    auto* const rows = static_cast<typename Element::Storage*>(to);
    switch (weight.form) {
      case PackedForm::kInt8:
        return widen_rows<PackedForm::kInt8, Element>(weight, in_features, begin, end, rows);
      case PackedForm::kFp8:
        return widen_rows<PackedForm::kFp8, Element>(weight, in_features, begin, end, rows);
      case PackedForm::kInt4:
        return widen_rows<PackedForm::kInt4, Element>(weight, in_features, begin, end, rows);
      case PackedForm::kInt4G32:
        return widen_rows<PackedForm::kInt4G32, Element>(weight, in_features, begin, end, rows);
    }
  };
  if (dtype == DType::kBFloat16) return widen(BF16{});
  widen(F16{});
}

}  // namespace hf_fastpath
