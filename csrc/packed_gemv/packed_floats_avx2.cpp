// What: packed_gemv.h's product for 1 to 32 rows of x in float32, with any weight of 4 or 8 bits: two blocks
// of
//   six weight rows at a time are dequantized into the first-level cache, and rows of x pass over them as
//   over weights of float32 (gemv/gemv_accumulate.h).
// Work split: a thread takes a range of outputs and walks it as six streams, see gemv_avx2.cpp.
// Traffic: quants, scales and zeros once; x from the second-level cache once for six outputs.
// Roofline: FMAs from some eight rows on. The four products of a layer of TinyLlama, two threads of an EPYC
//   held to AVX2, time as a share of float16 weights' own: 8, 17 and 32 rows of int8 98, 103 and 100 %, of
//   fp8 109, 106 and 100.
#include "gemv/gemv_accumulate.h"
#include "packed_gemv/packed_gemv_block.h"

namespace hf_fastpath {
namespace {

// The same of a format with records: the products of scales and quants are exact.
template <PackedFormat kFormat>
HF_INLINE void dequantize_with_record(const Row& row, int64_t b, float* to) {
  constexpr int64_t kBytes = kPackedBlock * bits_of(kFormat) / 8;
  const uint8_t* quants = row.quants + b * kBytes;
  const auto factors = BlockFactors<kFormat>::of(Row::record<kFormat>(row, b));
  if constexpr (Traits<kFormat>::kBits == 8) {  // a word of each sub-block after the other
    const auto by_word = [](const float* from) __attribute__((always_inline)) {
      return _mm256_set_m128(_mm_set1_ps(from[1]), _mm_set1_ps(from[0]));
    };
    for (int64_t i = 0; i < kPackedBlock; i += 8) {
      const int two = i / 8 % 2 * 2;  // sub-blocks
      const bool second = Traits<kFormat>::kScalesHalves && i >= kPackedBlock / 2;
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(quants + i));
      const __m256 steps = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
      const __m256 scale = by_word(factors.scale + (second ? kSubBlocks : 0) + two);
      _mm256_store_ps(to + i, _mm256_fmadd_ps(steps, scale, by_word(factors.minimum + two)));
    }
  } else {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (int64_t word = 0; word < kPackedBlock / 8; ++word) {
      const __m256i eight =
          _mm256_srlv_epi32(_mm256_set1_epi32(reinterpret_cast<const int32_t*>(quants)[word]), shifts);
      const __m256 steps = _mm256_cvtepi32_ps(_mm256_and_si256(eight, _mm256_set1_epi32(15)));
      const __m256 scale = _mm256_set1_ps(factors.scale[word % kSubBlocks]);
      _mm256_store_ps(to + word * 8,
                      _mm256_fmadd_ps(steps, scale, _mm256_set1_ps(factors.minimum[word % kSubBlocks])));
    }
  }
}

// A block's weights as they lie, but for the multiplier, the scale of a row, and fp8's 2^8: see
// dequantize_fp8 in packed_gemv_avx2.cpp.
template <PackedFormat kFormat>
HF_INLINE void dequantize(const Row& row, int64_t b, float* to) {
  constexpr int64_t kBytes = kPackedBlock * bits_of(kFormat) / 8;
  const uint8_t* quants = row.quants + b * kBytes;
  if constexpr (Traits<kFormat>::kHasRecords) {
    dequantize_with_record<kFormat>(row, b, to);
  } else if constexpr (Traits<kFormat>::kBits == 8 && !Traits<kFormat>::kIsFloat) {
    // Eight quants are of sub-blocks 0 and 1, and the next of 2 and 3.
    __m256 scale[2];
    __m256i zero[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto of = [&](int s) {
        const int64_t group = group_of(kFormat, b, 2 * half + s);
        const bool of_row = Traits<kFormat>::kScalesSums;
        return _mm_set1_ps(of_row ? 1.0f : scale_to_float(Row::scales_of<kFormat>(row)[group]));
      };
      scale[half] = _mm256_set_m128(of(1), of(0));
      if constexpr (Traits<kFormat>::kHasZeros) {
        const uint8_t* of_half = row.zeros + b * kSubBlocks + 2 * half;
        zero[half] = _mm256_set_m128i(_mm_set1_epi32(of_half[1]), _mm_set1_epi32(of_half[0]));
      }
    }
    for (int64_t i = 0; i < kPackedBlock; i += 8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(quants + i));
      __m256i steps;
      if constexpr (Traits<kFormat>::kIsSigned) {
        steps = _mm256_cvtepi8_epi32(bytes);
      } else {
        steps = _mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), zero[i / 8 % 2]);
      }
      _mm256_store_ps(to + i, _mm256_mul_ps(_mm256_cvtepi32_ps(steps), scale[i / 8 % 2]));
    }
  } else if constexpr (Traits<kFormat>::kIsFloat) {
    const auto store = [&](float* at, __m256 values) __attribute__((always_inline)) {
      if constexpr (!Traits<kFormat>::kScalesSums)
        values = _mm256_mul_ps(values, _mm256_set1_ps(scale_to_float(Row::scales_of<kFormat>(row)[b])));
      _mm256_store_ps(at, values);
    };
    for (int64_t i = 0; i < kPackedBlock; i += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(quants + i));
      const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
      const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16(short(0xbfff)));
      store(to + i, F16::widen(_mm256_castsi256_si128(halves)));
      store(to + i + 8, F16::widen(_mm256_extracti128_si256(halves, 1)));
    }
  } else {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const auto* scales = Row::scales_of<kFormat>(row);
    for (int64_t word = 0; word < kPackedBlock / 8; ++word) {
      const int64_t group = group_of(kFormat, b, word % kSubBlocks);
      const __m256i eight =
          _mm256_srlv_epi32(_mm256_set1_epi32(reinterpret_cast<const int32_t*>(quants)[word]), shifts);
      __m256 steps;
      if constexpr (Traits<kFormat>::kHasTable) {
        steps = looked_up<kFormat>(eight);
      } else {
        const __m256i zero =
            _mm256_set1_epi32(Traits<kFormat>::kHasZeros ? row.zeros[group] : Traits<kFormat>::kZero);
        steps = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(eight, _mm256_set1_epi32(15)), zero));
      }
      _mm256_store_ps(to + word * 8, _mm256_mul_ps(steps, _mm256_set1_ps(scale_to_float(scales[group]))));
    }
  }
}

struct Vector8 : Floats8 {
  static constexpr int kRows = 4;  // of x, as in gemv_avx2.cpp
};

// Blocks that are dequantized before rows of x pass over them.
constexpr int64_t kBlocks = 2;

// y[r][m * kRun] = the product of weight row r and row m of x, but for the multiplier. Rows of x pass in
// groups of about equal size.
template <PackedFormat kFormat, int kS>
void float_rows(const PackedArgs& args, const Row (&row)[kS], float* const (&y)[kS]) {
  constexpr int64_t kBytes = kPackedBlock * bits_of(kFormat) / 8;
  constexpr int kMost = Vector8::kRows;
  alignas(32) float weights[kS][kBlocks * kPackedBlock];
  TileRows<F32, kS> dequantized[kBlocks];  // blocks are summed in turns: fewer roundings follow each other
  for (int i = 0; i < kBlocks; ++i) {
    for (int r = 0; r < kS; ++r) dequantized[i].row[r] = weights[r] + i * kPackedBlock;
  }
  __m256 total[kBlocks][kS * kDequantizedRows];
  for (auto& each : total) {
    for (int r = 0; r < kS; ++r) {
      for (int64_t m = 0; m < args.rows; ++m) each[r * kDequantizedRows + m] = _mm256_setzero_ps();
    }
  }
  const int64_t ahead = read_ahead_bytes(), width = args.weight.blocks * kPackedBlock;
  const int64_t groups = (args.rows + kMost - 1) / kMost;
  for (int64_t b = 0; b < args.weight.blocks; b += kBlocks) {
    const int64_t blocks = min_of(kBlocks, args.weight.blocks - b);
    for (int r = 0; r < kS; ++r) {
      prefetch_quants(row[r].quants + b * kBytes + ahead, blocks * kBytes);
      for (int64_t i = 0; i < blocks; ++i) dequantize<kFormat>(row[r], b + i, weights[r] + i * kPackedBlock);
    }
    const float* x = args.x + b * kPackedBlock;
    for (int64_t g = 0, m = 0; g < groups; ++g) {
      const int64_t rows = (args.rows - m + groups - g - 1) / (groups - g);
      for (int64_t i = 0; i < blocks; ++i) {
        accumulate_rows<Vector8, F32, kS, kMost, kDequantizedRows>(
            rows, dequantized[i], x + i * kPackedBlock + m * width, width, kPackedBlock, 0, total[i] + m);
      }
      m += rows;
    }
  }
  for (int r = 0; r < kS; ++r) {
    const float of_row =
        Traits<kFormat>::kScalesSums ? scale_to_float(*Row::scales_of<kFormat>(row[r])) : 1.0f;
    const float scale = of_row * (Traits<kFormat>::kIsFloat ? 256.0f : 1.0f);
    for (int64_t m = 0; m < args.rows; ++m) {
      const int64_t place = r * kDequantizedRows + m;
      y[r][m * kRun] = horizontal_sum(_mm256_add_ps(total[0][place], total[1][place])) * scale;
    }
  }
}

template <PackedFormat kFormat>
void float_range(const PackedArgs& args, int64_t begin, int64_t end) {
  begin = streams<kRowStreams>(args, begin, end, [&](const auto& row, const auto& y) {
    float_rows<kFormat, kRowStreams>(args, row, y);
  });
  streams<1>(args, begin, end, [&](const auto& row, const auto& y) { float_rows<kFormat, 1>(args, row, y); });
}

}  // namespace

void packed_floats_avx2(const PackedArgs& args, int64_t begin, int64_t end) {
  return with_format(args.weight.format,
                     [&](auto tag) { return float_range<decltype(tag)::value>(args, begin, end); });
}

}  // namespace hf_fastpath
