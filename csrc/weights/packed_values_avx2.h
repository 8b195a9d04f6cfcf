// Scales of quantized weights, and values of formats whose quants are places in a table, for kernels with
// AVX2 and more. Linkage is internal, as in avx2_math.h.
#pragma once

#include "common/avx2_math.h"
#include "weights/packed_format.h"

namespace hf_fastpath {
namespace {

HF_INLINE float scale_to_float(uint16_t bits) { return half_to_float(bits); }
HF_INLINE float scale_to_float(float scale) { return scale; }
// 2^(byte - 127): bits of the exponent, but of the least a subnormal's.
HF_INLINE float scale_to_float(uint8_t byte) {
  const int bits = byte != 0 ? byte << 23 : 0x00400000;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
HF_INLINE __m256 powers_of_two(__m128i bytes) {
  return _mm256_castsi256_ps(
      _mm256_max_epi32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23), _mm256_set1_epi32(0x00400000)));
}

// The zeros of a block's sub-blocks, as 16 bytes of 8-bit quants want them: four a sub-block.
HF_INLINE __m256i zeros_of_sub_blocks(const uint8_t* zeros) {
  int bits;
  __builtin_memcpy(&bits, zeros, sizeof bits);
  const __m128i places = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm256_cvtepu8_epi16(_mm_shuffle_epi8(_mm_cvtsi32_si128(bits), places));
}

// A block's scales and minimums in float32, of its record; of halves of sub-blocks those of the first halves,
// then those of the second.
template <PackedFormat kFormat>
struct BlockFactors {
  float scale[2 * kSubBlocks], minimum[kSubBlocks];

  HF_INLINE BlockFactors of(const uint8_t* record) {
    constexpr PackedScales kScales = traits_of(kFormat).scales;
    const auto half = [&](int at) {
      uint16_t bits;
      __builtin_memcpy(&bits, record + at, sizeof bits);
      return half_to_float(bits);
    };
    BlockFactors made{};
    for (int s = 0; s < int(kSubBlocks); ++s) {
      if constexpr (are_pairs(kScales)) {
        const float scale = half(4 * s), other = half(4 * s + 2);
        made.scale[s] = scale;
        made.minimum[s] = kScales == PackedScales::kFloatZeros ? -scale * other  // exact
                          : kScales == PackedScales::kMiddles  ? other - 8.0f * scale
                                                               : other;
      } else if constexpr (kScales == PackedScales::kKMinimums) {
        made.scale[s] = half(0) * static_cast<float>(record[4 + s]);
        made.minimum[s] = -half(2) * static_cast<float>(record[8 + s]);
      } else {
        for (int h = 0; h < 2; ++h)
          made.scale[h * kSubBlocks + s] =
              half(0) * static_cast<float>(static_cast<int8_t>(record[4 + h * 4 + s]));
      }
    }
    return made;
  }
};

// Whether records are pairs of a scale and a minimum.
template <PackedFormat kFormat>
inline constexpr bool kHasPairs = are_pairs(traits_of(kFormat).scales);

// The scales of the sub-blocks' first halves, or of their second, as 16 bytes of 8-bit quants want them.
HF_INLINE __m256i scales_of_halves(const uint8_t* record, int half) {
  int bits;
  __builtin_memcpy(&bits, record + 4 + 4 * half, sizeof bits);
  const __m128i places = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(_mm_cvtsi32_si128(bits), places));
}

// Eight values; only the lowest four bits of a place count. A permutation takes three of them, and the fourth
// chooses between two: a table of 16 floats is two registers.
template <PackedFormat kFormat>
HF_INLINE __m256 looked_up(__m256i places) {
  const float* const table = traits_of(kFormat).table;
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), places);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), places);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(places, 28)));
}

// The table in whole steps, 32 values so that a place's fifth bit chooses between equal ones; and as tables
// of their low and of their high bytes.
template <PackedFormat kFormat>
struct TableSteps {
  alignas(64) int16_t words[32];
  alignas(16) uint8_t low[16], high[16];

  constexpr TableSteps() : words(), low(), high() {
    for (int i = 0; i < 32; ++i) {
      const float exact = traits_of(kFormat).table[i % 16] * static_cast<float>(traits_of(kFormat).steps);
      words[i] = static_cast<int16_t>(exact + (exact < 0 ? -0.5f : 0.5f));
      if (i >= 16) continue;
      low[i] = static_cast<uint8_t>(static_cast<uint16_t>(words[i]) & 255);
      high[i] = static_cast<uint8_t>(static_cast<uint16_t>(words[i]) >> 8);
    }
  }
};
template <PackedFormat kFormat>
inline constexpr TableSteps<kFormat> kTableSteps;

}  // namespace
}  // namespace hf_fastpath
