// Vectors of the AVX-512 kernels. Only packed_gemv_avx512.cpp and packed_gemv_avx512_vnni.cpp include this
// header.
#pragma once

#include "common/avx512_math.h"
#include "packed_gemv/packed_gemv_block.h"

namespace hf_fastpath {
namespace {

struct Avx512 : Floats16 {
  static constexpr int kAccumulators = 16;  // in half of the registers

  using Floats = Type;
  HF_INLINE Floats halves(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  HF_INLINE Floats bytes(const uint8_t* from) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(all));
  }
  HF_INLINE Floats all(float value) { return _mm512_set1_ps(value); }
  HF_INLINE Floats powers(const uint8_t* from) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_insertf32x8(_mm512_castps256_ps512(powers_of_two(all)),
                              powers_of_two(_mm_srli_si128(all, 8)), 1);
  }
  HF_INLINE Floats pair(const float* from) {
    return _mm512_mask_broadcastss_ps(_mm512_set1_ps(from[0]), 0xff00, _mm_load_ss(from + 1));
  }
  HF_INLINE void dequantize_fp8(const uint8_t* from, Floats (&to)[2]) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(short(0xbfff)));
    to[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    to[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }

  HF_INLINE Floats twice(const float* from) {
    const __m512i places = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(places, _mm512_castps256_ps512(_mm256_loadu_ps(from)));
  }

  struct Pieces {
    __m512i piece[4];
  };
  // A permutation of 16-bit words takes the lowest five bits of a place: no quant is cut out.
  template <PackedFormat kFormat>
  HF_INLINE Pieces looked_up(const uint8_t* quants) {
    const __m512i q = _mm512_loadu_si512(quants), words = _mm512_load_si512(kTableSteps<kFormat>.words);
    return {{_mm512_permutexvar_epi16(q, words), _mm512_permutexvar_epi16(_mm512_srli_epi16(q, 4), words),
             _mm512_permutexvar_epi16(_mm512_srli_epi16(q, 8), words),
             _mm512_permutexvar_epi16(_mm512_srli_epi16(q, 12), words)}};
  }
  template <int kBits>
  HF_INLINE Pieces pieces_of(const uint8_t* quants) {
    if constexpr (kBits == 8) {
      const auto* from = reinterpret_cast<const __m256i*>(quants);
      return {{_mm512_cvtepi8_epi16(_mm256_loadu_si256(from)),
               _mm512_cvtepi8_epi16(_mm256_loadu_si256(from + 1)),
               _mm512_cvtepi8_epi16(_mm256_loadu_si256(from + 2)),
               _mm512_cvtepi8_epi16(_mm256_loadu_si256(from + 3))}};
    } else {
      const __m512i low = _mm512_set1_epi16(15), q = _mm512_loadu_si512(quants);
      return {{_mm512_and_si512(q, low), _mm512_and_si512(_mm512_srli_epi16(q, 4), low),
               _mm512_and_si512(_mm512_srli_epi16(q, 8), low), _mm512_srli_epi16(q, 12)}};
    }
  }

  HF_INLINE Pieces pieces_of_bytes(const uint8_t* quants, const uint8_t* zeros) {
    const __m512i less = _mm512_broadcast_i64x4(zeros_of_sub_blocks(zeros));
    const auto* from = reinterpret_cast<const __m256i*>(quants);
    Pieces made;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      made.piece[i] = _mm512_sub_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256(from + i)), less);
    return made;
  }

  HF_INLINE Pieces scaled_pieces_of(const uint8_t* quants, const uint8_t* record) {
    const auto* from = reinterpret_cast<const __m256i*>(quants);
    Pieces made;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i scales = _mm512_broadcast_i64x4(scales_of_halves(record, i / 2));
      made.piece[i] = _mm512_mullo_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(from + i)), scales);
    }
    return made;
  }

  using Total = __m512i;
  HF_INLINE Total none() { return _mm512_setzero_si512(); }
  HF_INLINE Total dot(const Pieces& pieces, const void* steps) {
    Total total = none();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i product =
          _mm512_madd_epi16(pieces.piece[i], _mm512_load_si512(static_cast<const __m512i*>(steps) + i));
      total = _mm512_add_epi32(total, product);
    }
    return total;
  }
  // The halves of a, added, and those of b.
  HF_INLINE Total folded(Total a, Total b) {
    return _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
  }
  HF_INLINE Floats floats(Total a, Total b) { return _mm512_cvtepi32_ps(folded(a, b)); }
  HF_INLINE Floats floats(Total a, Total b, Total c, Total d) {
    const Total front = folded(a, b), back = folded(c, d);  // two quarters each
    return _mm512_cvtepi32_ps(
        _mm512_add_epi32(_mm512_shuffle_i64x2(front, back, 0x88), _mm512_shuffle_i64x2(front, back, 0xdd)));
  }
  HF_INLINE Floats wide_floats(Total a, Total b, Total c, Total d) {
    const __m512 front = _mm512_cvtepi32_ps(folded(a, b)), back = _mm512_cvtepi32_ps(folded(c, d));
    return _mm512_add_ps(_mm512_shuffle_f32x4(front, back, 0x88), _mm512_shuffle_f32x4(front, back, 0xdd));
  }
};

}  // namespace
}  // namespace hf_fastpath
