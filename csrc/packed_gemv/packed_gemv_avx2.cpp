// What: out = activation(x @ W.T + bias) + residual for 1 to 16 rows of x and a weight of 4 or 8 bits. For x
//   in 16 bits, integers: x is 16-bit steps of a size that each 32 inputs have for themselves, a power of
//   two, so that all but inputs far smaller than the largest are exact, as are products and their sums over a
//   block of 128 inputs; blocks are then weighted and summed in float32. For x in float32, and weights in
//   fp8, weights are widened to float32.
// Work split: a thread takes a range of outputs and walks it as four streams, see gemv_avx2.cpp.
// Traffic: quants, scales and zeros once; x, bias and outputs are small.
// Roofline: read bandwidth for one row of x.
#include <type_traits>

#include "common/avx2_math.h"
#include "common/epilogue_avx2.h"
#include "packed_gemv/packed_gemv_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int kStreams = 4;
constexpr int64_t kAheadBytes = 2048;  // prefetched in each stream
constexpr int64_t kRun = 16;           // outputs of a stream before bias and activation are applied to them

// Where a stream's weight row is.
struct Row {
  const uint8_t* quants;
  const uint16_t* scales;
  const uint8_t* zeros;

  HF_INLINE Row of(const PackedArgs& args, int64_t n) {
    return {args.quants + n * args.row_bytes(), args.scales + n * args.groups,
            args.zeros != nullptr ? args.zeros + n * args.groups : nullptr};
  }
};

HF_INLINE float half_to_float(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }

// ---- integers -----------------------------------------------------------------------------------------

// Sixteen-bit pieces of a block's quants, each against kPackedLanes * 2 steps.
template <PackedForm kForm>
HF_INLINE void pieces_of(const uint8_t* quants, __m256i (&piece)[8]) {
  if constexpr (bits_of(kForm) == 8) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      piece[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(quants + 16 * i)));
    }
  } else {
    const __m256i low = _mm256_set1_epi16(15);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quants + 32 * half));
      piece[4 * half] = _mm256_and_si256(q, low);
      piece[4 * half + 1] = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
      piece[4 * half + 2] = _mm256_and_si256(_mm256_srli_epi16(q, 8), low);
      piece[4 * half + 3] = _mm256_srli_epi16(q, 12);
    }
  }
}

// What the lanes' sums of block b are multiplied by, but for the steps' size.
template <PackedForm kForm>
HF_INLINE __m256 scales_of(const Row& row, int64_t b) {
  if constexpr (kForm == PackedForm::kInt4G32) {
    const __m128 four =
        _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row.scales + b * kStretches)));
    return _mm256_set_m128(four, four);
  } else {
    return _mm256_set1_ps(half_to_float(row.scales[b]));
  }
}

// y[r][m * kRun] = the product of weight row r and rows first_row + m of x, but for the multiplier.
template <PackedForm kForm, int kS, int kM>
HF_INLINE void integer_tile(const PackedArgs& args, const Row (&row)[kS], int64_t first_row,
                            float* const (&y)[kS]) {
  constexpr int64_t kBytes = kPackedBlock * bits_of(kForm) / 8;
  __m256 sum[kS][kM];
  for (int r = 0; r < kS; ++r) {
    for (int m = 0; m < kM; ++m) sum[r][m] = _mm256_setzero_ps();
  }
  const int64_t row_blocks = args.blocks;
  for (int64_t b = 0; b < row_blocks; ++b) {
#pragma GCC unroll 4
    for (int r = 0; r < kS; ++r) {
      const uint8_t* quants = row[r].quants + b * kBytes;
      for (int64_t line = 0; line < kBytes; line += kCacheLineBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(quants + line + kAheadBytes), _MM_HINT_T0);
      }
      __m256i piece[8];
      pieces_of<kForm>(quants, piece);
      const __m256 scales = scales_of<kForm>(row[r], b);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) {
        const int64_t at = (first_row + m) * row_blocks + b;
        const auto* steps = reinterpret_cast<const __m256i*>(args.steps + at * kPackedBlock);
        __m256i total = _mm256_madd_epi16(piece[0], _mm256_load_si256(steps));
#pragma GCC unroll 8
        for (int i = 1; i < 8; ++i) {
          total = _mm256_add_epi32(total, _mm256_madd_epi16(piece[i], _mm256_load_si256(steps + i)));
        }
        if constexpr (bits_of(kForm) == 4) {  // quants are 0 to 15
          const __m256i steps_sum =
              _mm256_load_si256(reinterpret_cast<const __m256i*>(args.step_sums + at * kPackedLanes));
          const __m256i zeros = kForm == PackedForm::kInt4
                                    ? _mm256_mullo_epi32(steps_sum, _mm256_set1_epi32(row[r].zeros[b]))
                                    : _mm256_slli_epi32(steps_sum, 3);
          total = _mm256_sub_epi32(total, zeros);
        }
        const __m256 worth = _mm256_mul_ps(scales, _mm256_load_ps(args.step_sizes + at * kPackedLanes));
        sum[r][m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), worth, sum[r][m]);
      }
    }
  }
  for (int r = 0; r < kS; ++r) {
    for (int m = 0; m < kM; ++m) y[r][m * kRun] = horizontal_sum(sum[r][m]);
  }
}

template <PackedForm kForm, int kS>
void integer_rows(const PackedArgs& args, const Row (&row)[kS], float* const (&y)[kS]) {
  int64_t m = 0;
  const auto tile = [&](auto count) {
    float* to[kS];
    for (int r = 0; r < kS; ++r) to[r] = y[r] + m * kRun;
    integer_tile<kForm, kS, decltype(count)::value>(args, row, m, to);
    m += decltype(count)::value;
  };
  while (args.rows - m >= 4) tile(std::integral_constant<int, 4>());
  if (args.rows - m >= 2) tile(std::integral_constant<int, 2>());
  if (args.rows - m >= 1) tile(std::integral_constant<int, 1>());
}

// ---- float32 ------------------------------------------------------------------------------------------

// A block's weights as they lie, but for the scale of a whole row and the multiplier.
template <PackedForm kForm>
HF_INLINE void widen(const Row& row, int64_t b, float* to) {
  constexpr int64_t kBytes = kPackedBlock * bits_of(kForm) / 8;
  const uint8_t* quants = row.quants + b * kBytes;
  if constexpr (kForm == PackedForm::kFp8) {
    for (int64_t i = 0; i < kPackedBlock; i += 16) {
      // Sign, exponent and mantissa as float16 has them, whose exponent's bias is 8 more.
      const __m256i bytes =
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(quants + i)));
      const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16(short(0xbfff)));
      const __m256 scale = _mm256_set1_ps(256.0f);
      _mm256_store_ps(to + i, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scale));
      _mm256_store_ps(to + i + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), scale));
    }
  } else if constexpr (kForm == PackedForm::kInt8) {
    const __m256 scale = _mm256_set1_ps(half_to_float(row.scales[b]));
    for (int64_t i = 0; i < kPackedBlock; i += 8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(quants + i));
      _mm256_store_ps(to + i, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), scale));
    }
  } else {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i zero = _mm256_set1_epi32(kForm == PackedForm::kInt4 ? row.zeros[b] : 8);
    for (int64_t word = 0; word < kPackedBlock / 8; ++word) {
      const int64_t group = kForm == PackedForm::kInt4 ? b : b * kStretches + word % kStretches;
      const __m256i eight =
          _mm256_srlv_epi32(_mm256_set1_epi32(reinterpret_cast<const int32_t*>(quants)[word]), shifts);
      const __m256i steps = _mm256_sub_epi32(_mm256_and_si256(eight, _mm256_set1_epi32(15)), zero);
      _mm256_store_ps(to + word * 8, _mm256_mul_ps(_mm256_cvtepi32_ps(steps),
                                                   _mm256_set1_ps(half_to_float(row.scales[group]))));
    }
  }
}

template <PackedForm kForm, int kS>
void float_rows(const PackedArgs& args, const Row (&row)[kS], float* const (&y)[kS]) {
  alignas(32) float weights[kPackedBlock];
  __m256 total[kS][kPackedRows];
  for (int r = 0; r < kS; ++r) {
    for (int64_t m = 0; m < args.rows; ++m) total[r][m] = _mm256_setzero_ps();
  }
  for (int64_t b = 0; b < args.blocks; ++b) {
    for (int r = 0; r < kS; ++r) {
      constexpr int64_t kBytes = kPackedBlock * bits_of(kForm) / 8;
      for (int64_t line = 0; line < kBytes; line += kCacheLineBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(row[r].quants + b * kBytes + line + kAheadBytes),
                     _MM_HINT_T0);
      }
      widen<kForm>(row[r], b, weights);
      for (int64_t m = 0; m < args.rows; ++m) {
        const float* x = args.x + (m * args.blocks + b) * kPackedBlock;
        __m256 sum[4] = {};
        for (int64_t i = 0; i < kPackedBlock; i += 32) {
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            sum[j] =
                _mm256_fmadd_ps(_mm256_load_ps(weights + i + 8 * j), _mm256_load_ps(x + i + 8 * j), sum[j]);
          }
        }
        const __m256 all = _mm256_add_ps(_mm256_add_ps(sum[0], sum[1]), _mm256_add_ps(sum[2], sum[3]));
        total[r][m] = _mm256_add_ps(total[r][m], all);
      }
    }
  }
  for (int r = 0; r < kS; ++r) {
    const float scale = kForm == PackedForm::kFp8 ? half_to_float(row[r].scales[0]) : 1.0f;
    for (int64_t m = 0; m < args.rows; ++m) y[r][m * kRun] = horizontal_sum(total[r][m]) * scale;
  }
}

// ---- outputs ------------------------------------------------------------------------------------------

template <PackedForm kForm, int kS>
void tile(const PackedArgs& args, const Row (&row)[kS], float* const (&y)[kS]) {
  if constexpr (kForm != PackedForm::kFp8) {
    if (args.steps != nullptr) return integer_rows<kForm, kS>(args, row, y);
  }
  float_rows<kForm, kS>(args, row, y);
}

template <class Element>
void finish(const PackedArgs& args, float* y, int64_t begin, int64_t count) {
  using Storage = typename Element::Storage;
  const auto* bias = static_cast<const Storage*>(args.bias);
  const auto* residual = static_cast<const Storage*>(args.residual);
  with_activation(args.activation, [&](auto tag) {
    for (int64_t m = 0; m < args.rows; ++m) {
      const int64_t at = m * args.out_features + begin;
      for (int64_t i = 0; i < kRun; ++i) y[m * kRun + i] *= args.multiplier;
      epilogue<Element, decltype(tag)::value>(y + m * kRun, nullptr, bias != nullptr ? bias + begin : nullptr,
                                              residual != nullptr ? residual + at : nullptr,
                                              static_cast<Storage*>(args.out) + at, count);
    }
  });
}

// Outputs [begin, end) as kS streams of equal length; returns where they end.
template <PackedForm kForm, int kS>
int64_t streams(const PackedArgs& args, int64_t begin, int64_t end) {
  alignas(32) float y[kS][kPackedRows * kRun] = {};
  const int64_t length = (end - begin) / kS;
  for (int64_t i = 0; i < length; i += kRun) {
    const int64_t count = min_of(kRun, length - i);
    for (int64_t j = 0; j < count; ++j) {
      Row row[kS];
      float* to[kS];
      for (int s = 0; s < kS; ++s) {
        row[s] = Row::of(args, begin + s * length + i + j);
        to[s] = y[s] + j;
      }
      tile<kForm, kS>(args, row, to);
    }
    for (int s = 0; s < kS; ++s) {
      with_element(args.dtype, [&](auto element) {
        finish<decltype(element)>(args, y[s], begin + s * length + i, count);
      });
    }
  }
  return begin + kS * length;
}

template <PackedForm kForm>
void range(const PackedArgs& args, int64_t begin, int64_t end) {
  streams<kForm, 1>(args, streams<kForm, kStreams>(args, begin, end), end);
}

}  // namespace

void packed_gemv_avx2(const PackedArgs& args, int64_t begin, int64_t end) {
  switch (args.form) {
    case PackedForm::kInt8:
      return range<PackedForm::kInt8>(args, begin, end);
    case PackedForm::kFp8:
      return range<PackedForm::kFp8>(args, begin, end);
    case PackedForm::kInt4:
      return range<PackedForm::kInt4>(args, begin, end);
    case PackedForm::kInt4G32:
      return range<PackedForm::kInt4G32>(args, begin, end);
  }
}

}  // namespace hf_fastpath
