// What: rows of a weight of 4 or 8 bits as float32, float16 or bfloat16, in order, for products of many rows
//   of x (gemm/gemm_cpu.cpp).
// Work split: the caller's threads take ranges of rows. Of a block of 128 weights four 16-byte pieces are
//   transposed, so that each is of one sub-block; eight values at a time are dequantized, scaled and rounded.
// Traffic: quants and scales once; what is written stays in a second-level cache.
// Roofline: instructions, some six for eight weights.
#include <algorithm>
#include <type_traits>

#include "common/avx2_math.h"
#include "weights/packed_values_avx2.h"
#include "weights/packed_weight_cpu.h"

namespace hf_fastpath {
namespace {

// Word w of four sub-blocks in piece[w] becomes word w of sub-block s in piece[s].
HF_INLINE void transpose_words(__m128i (&piece)[4]) {
  const __m128i a = _mm_unpacklo_epi32(piece[0], piece[1]), b = _mm_unpacklo_epi32(piece[2], piece[3]);
  const __m128i c = _mm_unpackhi_epi32(piece[0], piece[1]), d = _mm_unpackhi_epi32(piece[2], piece[3]);
  piece[0] = _mm_unpacklo_epi64(a, b), piece[1] = _mm_unpackhi_epi64(a, b);
  piece[2] = _mm_unpacklo_epi64(c, d), piece[3] = _mm_unpackhi_epi64(c, d);
}

// The upper 16 bits of a float32, rounded to nearest even.
HF_INLINE __m256i rounded_top(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}

// Sixteen quants in bytes, less their zero or as they are in fp8 and in tables, times `scale`. `zero`: of
// quants of 8 bits from 0 up. `minimum`: what is added, where the format has it.
template <PackedFormat kFormat, class Element>
HF_INLINE void dequantize_sixteen(__m128i bytes, __m256 scale, int zero, __m256 minimum,
                                  typename Element::Storage* to) {
  __m256 low, high;
  if constexpr (Traits<kFormat>::kIsFloat) {  // float16's bits of 2^-8 of the value
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16(short(0xbfff)));
    low = F16::widen(_mm256_castsi256_si128(halves)), high = F16::widen(_mm256_extracti128_si256(halves, 1));
  } else if constexpr (Traits<kFormat>::kHasTable) {
    low = looked_up<kFormat>(_mm256_cvtepu8_epi32(bytes));
    high = looked_up<kFormat>(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
  } else if constexpr (Traits<kFormat>::kBits == 8 && !Traits<kFormat>::kIsSigned) {
    const __m256i less = _mm256_set1_epi32(zero);
    low = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), less));
    high = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), less));
  } else {
    low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
  }
  if constexpr (Traits<kFormat>::kHasMinimums) {  // the product is exact
    low = _mm256_fmadd_ps(low, scale, minimum), high = _mm256_fmadd_ps(high, scale, minimum);
  } else {
    low = _mm256_mul_ps(low, scale), high = _mm256_mul_ps(high, scale);
  }
  if constexpr (std::is_same_v<Element, BF16>) {  // none is NaN
    const __m256i both = _mm256_packus_epi32(rounded_top(low), rounded_top(high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(both, 0xd8));
  } else {
    Element::store(to, low);
    Element::store(to + 8, high);
  }
}

// A block of 128 weights. `scale`, `zero`, `minimum`: of each sub-block; of halves of sub-blocks, `scale` has
// those of the second halves behind the others.
template <PackedFormat kFormat, class Element>
HF_INLINE void dequantize_block(const uint8_t* quants, const __m256 (&scale)[2 * kSubBlocks],
                                const int (&zero)[kSubBlocks], const __m256 (&minimum)[kSubBlocks],
                                typename Element::Storage* to) {
  constexpr int kHalves = bits_of(kFormat) / 4;  // of a sub-block
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) {
    __m128i piece[4];
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w)
      piece[w] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(quants + (4 * half + w) * 16));
    transpose_words(piece);
#pragma GCC unroll 4
    for (int s = 0; s < int(kSubBlocks); ++s) {
      auto* const at = to + s * kSubBlock + half * 16;
      if constexpr (kHalves == 2) {
        const int of_half = Traits<kFormat>::kScalesHalves ? half * int(kSubBlocks) : 0;
        dequantize_sixteen<kFormat, Element>(piece[s], scale[of_half + s], zero[s], minimum[s], at);
      } else {
        const __m128i nibble = _mm_set1_epi8(15), less = _mm_set1_epi8(static_cast<char>(zero[s]));
        const __m128i even = _mm_sub_epi8(_mm_and_si128(piece[s], nibble), less);
        const __m128i odd = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(piece[s], 4), nibble), less);
        dequantize_sixteen<kFormat, Element>(_mm_unpacklo_epi8(even, odd), scale[s], 0, minimum[s], at);
        dequantize_sixteen<kFormat, Element>(_mm_unpackhi_epi8(even, odd), scale[s], 0, minimum[s], at + 16);
      }
    }
  }
}

template <PackedFormat kFormat, class Element>
void dequantize_rows(const PackedWeight& weight, int64_t in_features, int64_t begin, int64_t end,
                     typename Element::Storage* to) {
  using Storage = typename Element::Storage;
  constexpr int64_t kBytes = kPackedBlock * bits_of(kFormat) / 8;
  using Scale = typename Traits<kFormat>::Scale;
  constexpr int kTogether = Traits<kFormat>::kTogether;
  const float unit = weight.multiplier * (Traits<kFormat>::kIsFloat ? 256.0f : 1.0f);
  alignas(32) Storage last[kPackedBlock];
  for (int64_t n = begin; n < end; ++n) {
    const uint8_t* quants = weight.quants + n * weight.row_bytes();
    const Scale* scales = static_cast<const Scale*>(weight.scales) + n * weight.groups;
    for (int64_t b = 0; b < weight.blocks; ++b, quants += kBytes) {
      __m256 scale[2 * kSubBlocks], minimum[kSubBlocks];
      int zero[kSubBlocks];
      BlockFactors<kFormat> factors;
      if constexpr (Traits<kFormat>::kHasRecords)
        factors = BlockFactors<kFormat>::of(scales + b * Traits<kFormat>::kRecordBytes);
#pragma GCC unroll 4
      for (int s = 0; s < int(kSubBlocks); ++s) {
        if constexpr (Traits<kFormat>::kHasRecords) {
          scale[s] = _mm256_set1_ps(factors.scale[s] * unit);
          if constexpr (Traits<kFormat>::kScalesHalves)
            scale[s + kSubBlocks] = _mm256_set1_ps(factors.scale[s + kSubBlocks] * unit);
          minimum[s] = _mm256_set1_ps(factors.minimum[s] * unit);
          zero[s] = 0;
          continue;
        }
        const int64_t group = group_of(kFormat, b, s);
        const float of_group = scale_to_float(scales[group]);
        zero[s] =
            Traits<kFormat>::kHasZeros ? weight.zeros[n * weight.groups + group] : Traits<kFormat>::kZero;
        scale[s] = s % kTogether == 0 ? _mm256_set1_ps(of_group * unit) : scale[s - 1];
      }
      const int64_t count = std::min(kPackedBlock, in_features - b * kPackedBlock);
      if (count == kPackedBlock) {
        dequantize_block<kFormat, Element>(quants, scale, zero, minimum, to);
      } else {
        dequantize_block<kFormat, Element>(quants, scale, zero, minimum, last);
        std::copy_n(last, count, to);
      }
      to += count;
    }
  }
}

}  // namespace

void dequantize_packed_avx2(const PackedWeight& weight, int64_t in_features, DType dtype, int64_t begin,
                            int64_t end, void* to) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    auto* const rows = static_cast<typename Element::Storage*>(to);
    return with_format(weight.format, [&](auto tag) {
      return dequantize_rows<decltype(tag)::value, Element>(weight, in_features, begin, end, rows);
    });
  });
}

}  // namespace hf_fastpath
