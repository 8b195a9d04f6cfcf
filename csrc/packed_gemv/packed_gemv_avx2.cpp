// What: out = activation(x @ W.T + bias) + residual for 1 to 16 rows of x in 16 bits and a weight of 4 or 8
// bits,
//   by integers: x is 16-bit steps of a size that each 32 inputs have for themselves, a power of two, so that
//   all but inputs far smaller than the largest are exact, as are products and their sums over a block of 128
//   inputs; blocks are then weighted and summed in float32. Weights in fp8 are dequantized to float32. Values
//   of a table are 16-bit steps as well: a table of 16 bytes is one register, and its lookup an instruction.
//   Other quants of four bits meet these steps as two bytes each, 256 * high + low: unpacking 32 of them
//   takes one or two instructions then, and sums of four products fit 16 bits. packed_gemv_block.h has the
//   products, for 16 values as two vectors of eight here.
// Work split: a thread takes a range of outputs and walks it as four streams, or two of one row where
//   the CPU follows them, see gemv_avx2.cpp; up to four rows of x share a block's quants.
// Traffic: quants, scales and zeros once; x, bias and outputs are small.
// Roofline: read bandwidth for one row of x, then instructions. All matrices of TinyLlama one after the
//   other, two threads, R = 30 to 31 GB/s, Xeon with AMX, 2026-11, of R, for one row and four in float16:
//   int8 98 and 46 %, fp8 86 for one, int4 83 and 29, int4_g32 89 and 36.
#include "packed_gemv/packed_gemv_block.h"

namespace hf_fastpath {
namespace {

struct Avx2 {
  static constexpr int kAccumulators = 4;  // in half of the registers

  struct Floats {
    __m256 low, high;
  };
  HF_INLINE Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  HF_INLINE Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  HF_INLINE Floats mul(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  HF_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  HF_INLINE Floats add(Floats a, Floats b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  HF_INLINE __m256 half(Floats value) { return _mm256_add_ps(value.low, value.high); }
  HF_INLINE Floats halves(const uint16_t* from) { return {F16::load(from), F16::load(from + 8)}; }
  HF_INLINE Floats bytes(const uint8_t* from) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)))};
  }
  HF_INLINE Floats powers(const uint8_t* from) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {powers_of_two(all), powers_of_two(_mm_srli_si128(all, 8))};
  }
  // Sign, exponent and mantissa as float16 has them, whose exponent's bias is 8 more. By way of memory: from
  // there a conversion takes no turn on the port that shuffles.
  HF_INLINE void dequantize_fp8(const uint8_t* from, Floats (&to)[2]) {
    alignas(32) uint16_t made[32];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const auto* bytes = reinterpret_cast<const __m128i*>(from + 16 * i);
      const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes));
      _mm256_store_si256(reinterpret_cast<__m256i*>(made + 16 * i),
                         _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbfff))));
    }
    asm("" : "+m"(made));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) to[i] = halves(made + 16 * i);
  }
  HF_INLINE Floats all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  HF_INLINE Floats pair(const float* from) { return {_mm256_set1_ps(from[0]), _mm256_set1_ps(from[1])}; }

  HF_INLINE Floats twice(const float* from) {
    const __m256 all = _mm256_loadu_ps(from);
    return {_mm256_permutevar8x32_ps(all, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(all, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
  }

  template <int kBits>
  struct Pieces {
    __m256i piece[kBits];  // 16 bytes as 16-bit values each; in four bits 32 low or high halves of bytes
  };
  template <int kBits>
  HF_INLINE Pieces<kBits> pieces_of(const uint8_t* quants) {
    Pieces<kBits> made;
    if constexpr (kBits == 8) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const auto* from = reinterpret_cast<const __m128i*>(quants + 16 * i);
        made.piece[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(from));
      }
    } else {
      const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quants + 32 * half));
        made.piece[half] = _mm256_and_si256(q, low);
        made.piece[half + 2] = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
      }
    }
    return made;
  }

  HF_INLINE Pieces<8> pieces_of_bytes(const uint8_t* quants, const uint8_t* zeros) {
    const __m256i less = zeros_of_sub_blocks(zeros);
    Pieces<8> made;
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const auto* from = reinterpret_cast<const __m128i*>(quants + 16 * i);
      made.piece[i] = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(from)), less);
    }
    return made;
  }

  HF_INLINE Pieces<8> scaled_pieces_of(const uint8_t* quants, const uint8_t* record) {
    Pieces<8> made;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i scales = scales_of_halves(record, half);
#pragma GCC unroll 4
      for (int i = 4 * half; i < 4 * half + 4; ++i) {
        const auto* from = reinterpret_cast<const __m128i*>(quants + 16 * i);
        made.piece[i] = _mm256_mullo_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(from)), scales);
      }
    }
    return made;
  }

  // Quants are looked up as bytes, low and high ones of 16-bit values, and brought together by their place in
  // 16 bits: what is second and fourth lies in the upper halves of bytes.
  template <PackedFormat kFormat>
  HF_INLINE Pieces<8> looked_up(const uint8_t* quants) {
    const __m256i low_bytes = _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i*>(kTableSteps<kFormat>.low)));
    const __m256i high_bytes = _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i*>(kTableSteps<kFormat>.high)));
    const __m256i nibble = _mm256_set1_epi8(15), upper = _mm256_set1_epi16(short(0xff00));
    Pieces<8> made;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quants + 32 * half));
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const __m256i places = _mm256_and_si256(odd ? _mm256_srli_epi16(q, 4) : q, nibble);
        const __m256i low = _mm256_shuffle_epi8(low_bytes, places);
        const __m256i high = _mm256_shuffle_epi8(high_bytes, places);
        made.piece[2 * odd + half] = _mm256_blendv_epi8(low, _mm256_slli_epi16(high, 8), upper);
        made.piece[2 * odd + 4 + half] = _mm256_blendv_epi8(_mm256_srli_epi16(low, 8), high, upper);
      }
    }
    return made;
  }

  using Total = __m256i;
  HF_INLINE Total none() { return _mm256_setzero_si256(); }
  HF_INLINE Total dot(const Pieces<8>& pieces, const void* steps) {
    const auto* from = static_cast<const __m256i*>(steps);
    Total total = none();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      total = _mm256_add_epi32(total, _mm256_madd_epi16(pieces.piece[i], _mm256_load_si256(from + i)));
    }
    return total;
  }
  HF_INLINE Total dot(const Pieces<4>& pieces, const void* steps) {
    const auto* from = static_cast<const __m256i*>(steps);
    // Four times two products of at most 15 * 128 are summed, which stays below 2^15.
    const auto sum = [&](const __m256i* bytes) __attribute__((always_inline)) {
      __m256i product[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        product[i] = _mm256_maddubs_epi16(pieces.piece[i], _mm256_load_si256(bytes + i));
      }
      return _mm256_add_epi16(_mm256_add_epi16(product[0], product[1]),
                              _mm256_add_epi16(product[2], product[3]));
    };
    return _mm256_add_epi32(_mm256_madd_epi16(sum(from), _mm256_set1_epi16(256)),
                            _mm256_madd_epi16(sum(from + 4), _mm256_set1_epi16(1)));
  }
  HF_INLINE Floats floats(Total a, Total b) { return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)}; }
  // The halves of a, added, and those of b.
  HF_INLINE __m256 folded(Total a, Total b) {
    return _mm256_cvtepi32_ps(
        _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)));
  }
  HF_INLINE Floats floats(Total a, Total b, Total c, Total d) { return {folded(a, b), folded(c, d)}; }
  HF_INLINE __m256 wide_folded(Total a, Total b) {
    const __m256 first = _mm256_cvtepi32_ps(a), second = _mm256_cvtepi32_ps(b);
    return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                         _mm256_permute2f128_ps(first, second, 0x31));
  }
  HF_INLINE Floats wide_floats(Total a, Total b, Total c, Total d) {
    return {wide_folded(a, b), wide_folded(c, d)};
  }
};

// ---- x as integers ------------------------------------------------------------------------------------

// The 4 x 4 matrix of 32-bit values that each half of four registers holds, transposed.
HF_INLINE void transpose(const __m256i (&row)[4], __m256i (&column)[4]) {
  const __m256i low = _mm256_unpacklo_epi32(row[0], row[1]), high = _mm256_unpackhi_epi32(row[0], row[1]);
  const __m256i low2 = _mm256_unpacklo_epi32(row[2], row[3]), high2 = _mm256_unpackhi_epi32(row[2], row[3]);
  column[0] = _mm256_unpacklo_epi64(low, low2);
  column[1] = _mm256_unpackhi_epi64(low, low2);
  column[2] = _mm256_unpacklo_epi64(high, high2);
  column[3] = _mm256_unpackhi_epi64(high, high2);
}

// Eight steps: x[0..3] and x[distance..], each four times its inverse.
HF_INLINE __m256i eight_steps(const float* x, int64_t distance, __m256 inverse) {
  const __m256 values = _mm256_set_m128(_mm_loadu_ps(x + distance), _mm_loadu_ps(x));
  return _mm256_cvtps_epi32(_mm256_mul_ps(values, inverse));
}

// The exponent that gives the largest of a sub-block `bits` bits, as bits of a float32: steps' size, and what
// inputs are multiplied by. Below 2^-100 inputs are far beyond 16-bit floats: a norm's subnormals. False if
// one is not finite.
HF_INLINE bool size_of(const float* x, int bits, float& size, float& inverse) {
  constexpr int kExponent = 23, kBias = 127;
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = 0; i < kSubBlock; i += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    most = _mm256_max_epi32(most, _mm256_and_si256(bits, magnitude));
  }
  __m128i top = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
  const int exponent = (_mm_cvtsi128_si32(top) >> kExponent) - kBias;  // of the leading bit
  const bool is_tiny = exponent < -100;
  const auto power = [&](int of) {
    return is_tiny ? 0.0f : _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((of + kBias) << kExponent)));
  };
  size = power(exponent + 1 - bits);
  inverse = power(bits - 1 - exponent);
  return exponent <= kBias;
}

// Steps of a block by sub-block, its inverses in `inverse`; returns the lanes' sums of them.
HF_INLINE __m256i steps_of_bytes(const float* x, const float* inverse, int16_t* to) {
  __m256i sum = _mm256_setzero_si256();
  const __m256 even = _mm256_set_m128(_mm_set1_ps(inverse[2]), _mm_set1_ps(inverse[0]));
  const __m256 odd = _mm256_set_m128(_mm_set1_ps(inverse[3]), _mm_set1_ps(inverse[1]));
  for (int64_t i = 0; i < kSubBlock; i += 4) {  // a word of each sub-block
    const __m256i steps = _mm256_packs_epi32(eight_steps(x + i, 2 * kSubBlock, even),
                                             eight_steps(x + kSubBlock + i, 2 * kSubBlock, odd));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + i * kSubBlocks), steps);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(steps, _mm256_set1_epi16(1)));
  }
  return sum;
}

// Those that meet words of eight quants; returns the lanes' sums of them.
HF_INLINE __m256i steps_of_nibbles(const float* x, const float* inverse, int16_t* to) {
  // This brings those of a word's eight steps together that have one piece's place.
  const __m256i by_plane =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  __m256i sum = _mm256_setzero_si256();
  for (int64_t half = 0; half < 2; ++half) {
    __m256i word[kSubBlocks], plane[4];
    for (int64_t s = 0; s < kSubBlocks; ++s) {
      const float* from = x + s * kSubBlock + half * 16;
      const __m256 all = _mm256_set1_ps(inverse[s]);
      const __m256i two = _mm256_packs_epi32(eight_steps(from, 8, all), eight_steps(from + 4, 8, all));
      word[s] = _mm256_shuffle_epi8(two, by_plane);
    }
    transpose(word, plane);
    for (int64_t p = 0; p < 4; ++p) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + p * 32 + half * 16), plane[p]);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(plane[p], _mm256_set1_epi16(1)));
    }
  }
  return sum;
}

// The same, each as 256 * high + low.
HF_INLINE __m256i split_steps_of_nibbles(const float* x, const float* inverse, int8_t* to) {
  // This brings steps of four words that meet low halves of bytes in front of those that meet high halves.
  const __m256i by_half =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const auto store = [&](__m256i two, __m256i other_two, int8_t* at) {
    const __m256i steps = _mm256_shuffle_epi8(_mm256_packs_epi16(two, other_two), by_half);
    const __m128i first = _mm256_castsi256_si128(steps), last = _mm256_extracti128_si256(steps, 1);
    _mm_store_si128(reinterpret_cast<__m128i*>(at), _mm_unpacklo_epi16(first, last));
    _mm_store_si128(reinterpret_cast<__m128i*>(at + kPackedBlock / 2), _mm_unpackhi_epi16(first, last));
  };
  __m256i sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < kSubBlock; i += 8) {  // a word of each sub-block
    __m256i words[2], low[2], high[2];
    for (int64_t pair = 0; pair < 2; ++pair) {
      __m256i word[2];
      for (int64_t s = 0; s < 2; ++s) {
        const float* from = x + (2 * pair + s) * kSubBlock + i;
        word[s] = eight_steps(from, 4, _mm256_set1_ps(inverse[2 * pair + s]));
      }
      words[pair] = _mm256_packs_epi32(word[0], word[1]);
      low[pair] = _mm256_srai_epi16(_mm256_slli_epi16(words[pair], 8), 8);
      high[pair] = _mm256_srai_epi16(_mm256_sub_epi16(words[pair], low[pair]), 8);
    }
    store(high[0], high[1], to + 2 * i);
    store(low[0], low[1], to + kPackedBlock + 2 * i);
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i halves =
        _mm256_hadd_epi32(_mm256_madd_epi16(words[0], ones), _mm256_madd_epi16(words[1], ones));
    const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    const __m128i none = _mm_setzero_si128();  // words take turns in the lanes of a product
    sum = _mm256_add_epi32(sum, i % 16 == 0 ? _mm256_set_m128i(none, all) : _mm256_set_m128i(all, none));
  }
  return sum;
}

}  // namespace

bool packed_steps_avx2(const PackedArgs& args, const float* x, void* steps, float* sizes, float* offsets) {
  const int64_t lanes = lanes_of(args.weight.format);
  const bool in_bytes = bits_of(args.weight.format) == 8;
  // 14: high bytes of split steps stay below 128, and sums of quants times their scale below 2^31.
  const int64_t group = traits_of(args.weight.format).group;
  const int bits = in_bytes && (group == 0 || group >= kSubBlock) ? 15 : 14;
  const int added = has_minimums(args.weight.format) ? -1
                    : has_zeros(args.weight.format)  ? 1
                                                     : traits_of(args.weight.format).zero;
  for (int64_t b = 0; b < args.step_blocks; ++b, x += kPackedBlock) {
    float inverse[kSubBlocks];
    alignas(16) float size[kSubBlocks] = {};
    __m256i sum = _mm256_setzero_si256();
    if (b < args.weight.blocks) {
      for (int64_t s = 0; s < kSubBlocks; ++s) {
        if (!size_of(x + s * kSubBlock, bits, size[s], inverse[s])) return false;
      }
      auto* to = static_cast<int8_t*>(steps) + b * kStepBytes;
      if (in_bytes) {
        sum = steps_of_bytes(x, inverse, reinterpret_cast<int16_t*>(to));
      } else if (args.split) {
        sum = split_steps_of_nibbles(x, inverse, to);
      } else {
        sum = steps_of_nibbles(x, inverse, reinterpret_cast<int16_t*>(to));
      }
    }
    const __m128 by_sub_block = _mm_load_ps(size);
    if (lanes == kSubBlocks) {
      const __m128i whole = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
      _mm_store_ps(sizes + b * lanes, by_sub_block);
      _mm_store_ps(offsets + b * lanes, _mm_cvtepi32_ps(_mm_mullo_epi32(whole, _mm_set1_epi32(-added))));
    } else {
      const __m256i order =
          in_bytes ? _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3) : _mm256_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3);
      _mm256_store_ps(sizes + b * lanes,
                      _mm256_permutevar8x32_ps(_mm256_castps128_ps256(by_sub_block), order));
      const __m256i off = added < 0 ? sum : _mm256_sub_epi32(_mm256_setzero_si256(), sum);
      _mm256_store_ps(offsets + b * lanes, _mm256_cvtepi32_ps(off));
    }
  }
  return true;
}

void packed_gemv_avx2(const PackedArgs& args, int64_t begin, int64_t end) { range<Avx2>(args, begin, end); }

}  // namespace hf_fastpath
