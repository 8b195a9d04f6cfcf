// Weights of 4 or 8 bits as float16 or bfloat16, 32 of a sub-block at a time. Only *_avx512_bf16.cpp include
// this header; linkage is internal, as in avx2_math.h.
#pragma once

#include "common/avx512_math.h"
#include "weights/packed_values_avx2.h"
#include "weights/packed_weight_cpu.h"

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

// 32 values as kTerms vectors of Element. The first of two has bits cut off, and the second is these.
template <class Element, int kTerms>
HF_INLINE void round_in_terms(__m512 low, __m512 high, __m512i (&to)[kTerms]) {
  if constexpr (kTerms == 1) {
    to[0] = rounded<Element>(low, high);
  } else {
    static_assert(std::is_same_v<Element, BF16>);
    const auto cut = [](__m512 value) {
      const __m512i kept = _mm512_set1_epi32(static_cast<int>(0xffff0000));
      return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(value), kept));
    };
    const __m512 low_kept = cut(low), high_kept = cut(high);
    to[0] = rounded<Element>(low_kept, high_kept);
    to[1] = rounded<Element>(_mm512_sub_ps(low, low_kept), _mm512_sub_ps(high, high_kept));
  }
}

// ---- quants of four bits: a table of 16 values, twice, for a scale ----

// Byte b of sub-block s's words becomes both halves of the dword that its two weights are written to.
HF_INLINE __m512i nibble_places(int s) {
  const __m128i lane = _mm_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1);
  const __m128i moved = _mm_add_epi8(
      lane, _mm_and_si128(_mm_cmpgt_epi8(lane, _mm_set1_epi8(-1)), _mm_set1_epi8(static_cast<char>(4 * s))));
  return _mm512_broadcast_i32x4(moved);
}

// A sub-block of a block's 64 bytes, looked up in its table.
HF_INLINE __m512i nibble_words(__m512i both, int s, __m512i values) {
  // Only the lowest five bits of a word count, of which the fifth chooses between equal halves.
  const __m512i bytes = _mm512_shuffle_epi8(both, nibble_places(s));
  const __m512i places = _mm512_srlv_epi16(bytes, _mm512_set1_epi32(4 << 16));
  return _mm512_permutexvar_epi16(places, values);
}

// ---- int8 ----

// A sub-block of a block's 128 signed bytes, times kByteUnit, as each lies in the upper byte of 32 bits.
// `unit`: of its first half and of its second.
constexpr float kByteUnit = 0x1p-24f;
HF_INLINE void byte_values(__m512i first, __m512i second, int s, const __m512 (&unit)[2], __m512& low,
                           __m512& high) {
  const __m128i lane =
      _mm_setr_epi8(-1, -1, -1, 4 * s, -1, -1, -1, 4 * s + 1, -1, -1, -1, 4 * s + 2, -1, -1, -1, 4 * s + 3);
  const __m512i places = _mm512_broadcast_i32x4(lane);
  low = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_shuffle_epi8(first, places)), unit[0]);
  high = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_shuffle_epi8(second, places)), unit[1]);
}

// The same of bytes from 0 up, less a zero and times a scale.
HF_INLINE void byte_values_less(__m512i first, __m512i second, int s, int zero, __m512 scale, __m512& low,
                                __m512& high) {
  const __m128i lane =
      _mm_setr_epi8(4 * s, -1, -1, -1, 4 * s + 1, -1, -1, -1, 4 * s + 2, -1, -1, -1, 4 * s + 3, -1, -1, -1);
  const __m512i places = _mm512_broadcast_i32x4(lane), less = _mm512_set1_epi32(zero);
  const auto value = [&](__m512i bytes) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_shuffle_epi8(bytes, places), less)),
                         scale);
  };
  low = value(first), high = value(second);
}

// ---- fp8: a table of the 128 values that are not negative; where blocks have scales, values one by one ----

template <PackedFormat kFormat>
constexpr bool kLooksUp = Traits<kFormat>::kIsFloat && Traits<kFormat>::kScalesSums;

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

// Sub-blocks 2 * pair and 2 * pair + 1 of a block's 128 bytes.
HF_INLINE __m512i fp8_bytes(__m512i first, __m512i second, int pair) {
  const __m512i words =
      _mm512_add_epi32(_mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29),
                       _mm512_set1_epi32(2 * pair));
  return _mm512_permutex2var_epi32(first, words, second);
}

// The same, looked up.
HF_INLINE void fp8_words(__m512i first, __m512i second, int pair, const Fp8Values& values, __m512i (&to)[2]) {
  const __m512i bytes = fp8_bytes(first, second, pair);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m512i places =
        _mm512_cvtepu8_epi16(half == 0 ? _mm512_castsi512_si256(bytes) : _mm512_extracti64x4_epi64(bytes, 1));
    const __m512i low = _mm512_permutex2var_epi16(values.words[0], places, values.words[1]);
    const __m512i high = _mm512_permutex2var_epi16(values.words[2], places, values.words[3]);
    const __mmask32 is_high = _mm512_test_epi16_mask(places, _mm512_set1_epi16(64));
    const __m512i magnitude = _mm512_mask_blend_epi16(is_high, low, high);
    const __m512i negative = _mm512_slli_epi16(places, 8);
    to[half] =
        _mm512_ternarylogic_epi32(magnitude, negative, _mm512_set1_epi16(static_cast<short>(0x8000)), 0xf8);
  }
}

// ---- any ----

// What an inner loop knows of a weight, by value: what writes to memory could else change it.
template <PackedFormat kFormat>
struct PackedRows {
  static constexpr int64_t kBytes = kPackedBlock * bits_of(kFormat) / 8;  // of a block
  using Scale = typename Traits<kFormat>::Scale;
  const uint8_t* quants;
  const Scale* scales;
  const uint8_t* zeros;
  int64_t blocks, groups;

  HF_INLINE PackedRows of(const PackedWeight& args) {
    return {args.quants, static_cast<const Scale*>(args.scales), args.zeros, args.blocks, args.groups};
  }
  // The record of a row's block.
  HF_INLINE BlockFactors<kFormat> factors(const PackedRows& weight, int64_t row, int64_t b) {
    return BlockFactors<kFormat>::of(weight.scales + row * weight.groups + b * Traits<kFormat>::kRecordBytes);
  }
  // The quants of a row's block.
  HF_INLINE const uint8_t* block(const PackedRows& weight, int64_t row, int64_t b) {
    return weight.quants + (row * weight.blocks + b) * kBytes;
  }
  HF_INLINE int zero(const PackedRows& weight, int64_t row, int64_t b, int s) {
    return Traits<kFormat>::kHasZeros ? weight.zeros[row * weight.groups + group_of(kFormat, b, s)]
                                      : Traits<kFormat>::kZero;
  }
  HF_INLINE float scale(const PackedRows& weight, int64_t row, int64_t b, int s) {
    return scale_to_float(weight.scales[row * weight.groups + group_of(kFormat, b, s)]);
  }
};

// A weight whose sums are multiplied by sum_factors(): fp8 and bytes are exact in bfloat16 without their
// row's scale.
template <PackedFormat kFormat>
struct SumScaledRows {
  PackedRows<kFormat> rows;
  Fp8Values values;

  HF_INLINE SumScaledRows of(const PackedWeight& args) {
    SumScaledRows weight{PackedRows<kFormat>::of(args), {}};
    if constexpr (kLooksUp<kFormat>) weight.values = fp8_values<BF16>(1.0f);
    return weight;
  }
};

// Those of outputs [n, n + count), of which the last before `end` stands for all behind it.
HF_INLINE void sum_factors(const PackedWeight& args, int64_t n, int64_t end, int64_t count, float* to) {
  const bool by_row = has_scale_of_row(args.format);
  const bool are_floats = scale_bytes(args.format) == 4;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = min_of(n + i, end - 1);
    const float scale = !by_row      ? 1.0f
                        : are_floats ? static_cast<const float*>(args.scales)[row]
                                     : half_to_float(static_cast<const uint16_t*>(args.scales)[row]);
    to[i] = args.multiplier * scale;
  }
}

// The words of a row's block, with their scales, but for that of a row, and the multiplier: write(s, term, 32
// of sub-block s). Those of fp8 with a scale for each row are looked up in `values`.
template <PackedFormat kFormat, class Element, int kTerms, class Write>
HF_INLINE void dequantize_block(PackedRows<kFormat> weight, int64_t row, int64_t b, float multiplier,
                                const Fp8Values& values, const Write& write) {
  using Weight = PackedRows<kFormat>;
  constexpr int kCount = kSubBlocks;
  __m512i words[kTerms];
  const uint8_t* const quants = Weight::block(weight, row, b);
  const __m512i first = _mm512_loadu_si512(quants);
  BlockFactors<kFormat> factors;
  if constexpr (Traits<kFormat>::kHasRecords) factors = Weight::factors(weight, row, b);
  const auto scale = [&](int s) {
    if constexpr (Traits<kFormat>::kHasRecords) return factors.scale[s] * multiplier;
    return (Traits<kFormat>::kScalesSums ? 1.0f : Weight::scale(weight, row, b, s)) * multiplier;
  };
  if constexpr (bits_of(kFormat) == 4) {
    __m512 steps;
    if constexpr (Traits<kFormat>::kHasTable) {
      steps = _mm512_loadu_ps(traits_of(kFormat).table);
    } else {
      steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
#pragma GCC unroll 4
    for (int s = 0; s < kCount; ++s) {
      if (s % Traits<kFormat>::kTogether == 0) {
        const auto zero = static_cast<float>(Weight::zero(weight, row, b, s));  // a table has 0
        __m512 table;
        if constexpr (Traits<kFormat>::kHasMinimums) {
          table = _mm512_fmadd_ps(steps, _mm512_set1_ps(scale(s)),
                                  _mm512_set1_ps(factors.minimum[s] * multiplier));
        } else {
          table = _mm512_mul_ps(_mm512_sub_ps(steps, _mm512_set1_ps(zero)), _mm512_set1_ps(scale(s)));
        }
        round_in_terms<Element>(table, table, words);
      }
      for (int term = 0; term < kTerms; ++term) write(s, term, nibble_words(first, s, words[term]));
    }
  } else {
    const __m512i second = _mm512_loadu_si512(quants + 64);
    if constexpr (!Traits<kFormat>::kIsFloat) {
      __m512 of_sub_block[2];
#pragma GCC unroll 4
      for (int s = 0; s < kCount; ++s) {
        __m512 low, high;
        if (s % Traits<kFormat>::kTogether == 0) {
          const float unit = Traits<kFormat>::kIsSigned ? kByteUnit : 1.0f;
          of_sub_block[0] = of_sub_block[1] = _mm512_set1_ps(scale(s) * unit);
          if constexpr (Traits<kFormat>::kScalesHalves)
            of_sub_block[1] = _mm512_set1_ps(scale(s + int(kSubBlocks)) * unit);
        }
        if constexpr (Traits<kFormat>::kIsSigned) {
          byte_values(first, second, s, of_sub_block, low, high);
        } else {
          byte_values_less(first, second, s, Weight::zero(weight, row, b, s), of_sub_block[0], low, high);
        }
        if constexpr (Traits<kFormat>::kHasMinimums) {  // the product is exact
          const __m512 minimum = _mm512_set1_ps(factors.minimum[s] * multiplier);
          low = _mm512_add_ps(low, minimum), high = _mm512_add_ps(high, minimum);
        }
        round_in_terms<Element>(low, high, words);
        for (int term = 0; term < kTerms; ++term) write(s, term, words[term]);
      }
    } else if constexpr (!Traits<kFormat>::kScalesSums) {
      const __m512 unit = _mm512_set1_ps(scale(0) * 256.0f);  // of float16's bits that are 2^-8 of the value
#pragma GCC unroll 2
      for (int pair = 0; pair < kCount / 2; ++pair) {
        const __m512i bytes = fp8_bytes(first, second, pair);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m512i wide = _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(bytes, half));
          const __m512i bits =
              _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(static_cast<short>(0xbfff)));
          round_in_terms<Element>(_mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), unit),
                                  _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1)), unit),
                                  words);
          for (int term = 0; term < kTerms; ++term) write(2 * pair + half, term, words[term]);
        }
      }
    } else {
      static_assert(kTerms == 1);
#pragma GCC unroll 2
      for (int pair = 0; pair < kCount / 2; ++pair) {
        __m512i both[2];
        fp8_words(first, second, pair, values, both);
        for (int half = 0; half < 2; ++half) write(2 * pair + half, 0, both[half]);
      }
    }
  }
}

}  // namespace
}  // namespace hf_fastpath
