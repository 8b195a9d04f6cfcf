// What: products of some to many rows of x in bfloat16 with a quantized weight, by vdpbf16ps, see
//   gemv_avx512_bf16.cpp. Weights are widened with their scale and rounded once; fp8 is exact in bfloat16,
//   and its row's scale is applied to the sums. Subnormal bfloat16 count as zeros.
// Work split: a thread takes a range of outputs, 48 at a time, and all rows of x. Of six outputs a block of
//   1,024 inputs is widened into the first-level cache, where three by three they meet eight rows of x: 24
//   sums in registers, which are added up to one float32 an output when the block ends.
// Traffic: quants and scales once; a block of x from the second-level cache once for six outputs, and x from
//   memory once for 48.
// Roofline: read bandwidth for few rows, then products of pairs. A layer of TinyLlama, two threads, of these
//   products in registers: Zen 4 (one 512-bit instruction a cycle), 2026-11, 61 % for 32 rows, 78 for 128, 82
//   for 192; Zen 5 (two), 70, 84 and 90.
#include "common/avx512_math.h"
#include "packed_gemm/packed_widen_avx512.h"
#include "packed_gemv/packed_gemv_block.h"

namespace hf_fastpath {
namespace {

constexpr int kStep = 32;                 // inputs of a vector
constexpr int kTogether = 3;              // outputs that meet rows of x at once
constexpr int kWidened = 2 * kTogether;   // outputs that are widened at a time
constexpr int64_t kStrip = kPairedStrip;  // outputs that a block of x meets while it is near
constexpr int64_t kBlocks = 8;            // of kPackedBlock inputs, that are widened at a time
constexpr int64_t kDepth = kBlocks * kPackedBlock;
constexpr int kRows = kPairedRows;
static_assert(kStrip % kWidened == 0 && kStrip % kRun == 0 && kRun == 2 * kRows);

// Where a group of rows of x begins; they are of about equal size.
HF_INLINE int64_t group_begin(int64_t rows, int64_t group) { return rows * group / paired_groups(rows); }

// ---- products -----------------------------------------------------------------------------------------

// The sums of eight vectors.
HF_INLINE __m256 eight_sums(const __m512 (&v)[kRows]) {
  __m512 two[4], four[2];  // as many vectors' sums in each, of eight values, then of four
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = v[2 * i], b = v[2 * i + 1];
    two[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512 a = two[2 * i], b = two[2 * i + 1];
    four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const __m512 eight =
      _mm512_add_ps(_mm512_shuffle_ps(four[0], four[1], 0x88), _mm512_shuffle_ps(four[0], four[1], 0xdd));
  const __m512 twice = _mm512_add_ps(eight, _mm512_permute_ps(eight, 0xb1));
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(places, twice));
}

// sums[r * stride + m] (+)= the product of output r of kWidened and row m of kM over `steps` times kStep
// inputs.
template <int kM>
void multiply(const uint16_t* weights, const uint16_t* x, int64_t steps, float* sums, int64_t stride,
              bool first) {
  for (int half = 0; half < kWidened / kTogether; ++half) {
    const uint16_t* w = weights + half * kTogether * kDepth;
    const uint16_t* rows = x;
    __m512 sum[kTogether][kRows];
#pragma GCC unroll 3
    for (int r = 0; r < kTogether; ++r) {
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sum[r][m] = _mm512_setzero_ps();
    }
    for (int64_t step = 0; step < steps; ++step, w += kTogether * kStep, rows += kM * kStep) {
      __m512i weight[kTogether];
#pragma GCC unroll 3
      for (int r = 0; r < kTogether; ++r) weight[r] = _mm512_load_si512(w + r * kStep);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) {
        __m512i value = _mm512_load_si512(rows + m * kStep);
        asm("" : "+v"(value));  // one load for all outputs, not one a product
#pragma GCC unroll 3
        for (int r = 0; r < kTogether; ++r) {
          sum[r][m] = _mm512_dpbf16_ps(sum[r][m], reinterpret_cast<__m512bh>(weight[r]),
                                       reinterpret_cast<__m512bh>(value));
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kTogether; ++r) {
      float* const to = sums + (half * kTogether + r) * stride;
      const __m256 made = eight_sums(sum[r]);
      _mm256_store_ps(to, first ? made : _mm256_add_ps(_mm256_load_ps(to), made));
    }
  }
}

// The same for `rows` rows of x, kRows / 2 to kRows.
template <int kM = kRows>
HF_INLINE void multiply_rows(int64_t rows, const uint16_t* weights, const uint16_t* x, int64_t steps,
                             float* sums, int64_t stride, bool first) {
  if constexpr (kM > kRows / 2) {
    if (rows < kM) return multiply_rows<kM - 1>(rows, weights, x, steps, sums, stride, first);
  }
  multiply<kM>(weights, x, steps, sums, stride, first);
}

// ---- outputs ------------------------------------------------------------------------------------------

// to[m * kRun + r] = from[r * stride + m] for eight times eight.
HF_INLINE void transpose_eight(const float* from, int64_t stride, float* to) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = _mm256_load_ps(from + i * stride);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_store_ps(to + i * kRun, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_store_ps(to + (i + 4) * kRun, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}

// Outputs [n, n + count) of all rows, from sums[output * stride + kRows * group + row of the group].
void finish_strip(const PackedArgs& args, const float* sums, int64_t stride, int64_t n, int64_t count) {
  alignas(64) float y[kRows * kRun];
  const bool by_row = args.form == PackedForm::kFp8;
  for (int64_t i = 0; i < count; i += kRun) {
    const int64_t some = min_of(kRun, count - i);
    const auto mask = static_cast<__mmask16>((1u << some) - 1);
    __m512 scales = _mm512_set1_ps(1.0f);
    if (by_row) scales = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, args.scales + n + i));
    for (int64_t group = 0; group < paired_groups(args.rows); ++group) {
      transpose_eight(sums + i * stride + group * kRows, stride, y);
      transpose_eight(sums + (i + kRows) * stride + group * kRows, stride, y + kRows);
      const int64_t first = group_begin(args.rows, group), end = group_begin(args.rows, group + 1);
      for (int64_t m = 0; by_row && m < end - first; ++m) {
        _mm512_store_ps(y + m * kRun, _mm512_mul_ps(_mm512_load_ps(y + m * kRun), scales));
      }
      finish<BF16>(args.of_rows(first, end - first), y, n + i, some);
    }
  }
}

template <PackedForm kForm>
void range_in_pairs(const PackedArgs& args, int64_t begin, int64_t end, float* sums) {
  using Weight = PackedWeight<kForm>;
  alignas(64) uint16_t widened[kWidened * kDepth];
  const Weight weight = Weight::of(args);
  Fp8Values values;
  if constexpr (kForm == PackedForm::kFp8) values = fp8_values<BF16>(1.0f);
  const int64_t groups = paired_groups(args.rows), stride = groups * kRows;
  // Block b of an output to every kTogether-th vector, while one that is widened later is asked for.
  const auto widen = [&](int64_t row, int64_t b, int64_t next_row, int64_t next_block, uint16_t* to) {
    const uint8_t* next =
        Weight::block(weight, min_of(next_row, args.out_features - 1), min_of(next_block, args.blocks - 1));
    for (int64_t line = 0; line < Weight::kBytes; line += kCacheLineBytes) {
      _mm_prefetch(reinterpret_cast<const char*>(next + line), _MM_HINT_T1);
    }
    widen_block<kForm, BF16, 1>(weight, row, b, 1.0f, values, [&](int s, int, __m512i words) {
      _mm512_store_si512(to + s * kTogether * kStep, words);
    });
  };
  for (int64_t n = begin; n < end; n += kStrip) {
    const int64_t count = min_of(kStrip, end - n);
    for (int64_t b = 0; b < args.blocks; b += kBlocks) {
      const int64_t some = min_of(kBlocks, args.blocks - b), steps = some * kStretches;
      for (int64_t r = 0; r < count; r += kWidened) {
        // After these the next outputs are widened, or the first of the strip in the next block.
        const bool same = r + kWidened < count, more = b + kBlocks < args.blocks;
        const int64_t next = same ? n + r + kWidened : more ? n : n + kStrip;
        const int64_t next_block = same ? b : more ? b + kBlocks : 0;
        for (int64_t i = 0; i < kWidened; ++i) {
          const int64_t row = min_of(n + r + i, end - 1);
          uint16_t* to = widened + i / kTogether * kTogether * kDepth + i % kTogether * kStep;
          for (int64_t j = 0; j < some; ++j, to += kTogether * kPackedBlock) {
            widen(row, b + j, next + i, next_block + j, to);
          }
        }
        const uint16_t* x = args.tiles + b * kPackedBlock * args.rows;
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t rows = group_begin(args.rows, group + 1) - group_begin(args.rows, group);
          multiply_rows(rows, widened, x, steps, sums + r * stride + group * kRows, stride, b == 0);
          x += rows * steps * kStep;
        }
      }
    }
    finish_strip(args, sums, stride, n, count);
  }
}

}  // namespace

void packed_pairs_avx512_bf16(const PackedArgs& args, int64_t begin, int64_t end, float* sums) {
  switch (args.form) {
    case PackedForm::kInt8:
      return range_in_pairs<PackedForm::kInt8>(args, begin, end, sums);
    case PackedForm::kFp8:
      return range_in_pairs<PackedForm::kFp8>(args, begin, end, sums);
    case PackedForm::kInt4:
      return range_in_pairs<PackedForm::kInt4>(args, begin, end, sums);
    case PackedForm::kInt4G32:
      return range_in_pairs<PackedForm::kInt4G32>(args, begin, end, sums);
  }
}

void paired_rows_avx512_bf16(const PackedArgs& args, int64_t in_features, const void* from, int64_t stride,
                             int64_t begin, int64_t end, uint16_t* to) {
  const auto* x = static_cast<const uint16_t*>(from);
  const int64_t width = args.blocks * kPackedBlock;
  for (int64_t k = 0; k < width; k += kDepth) {
    const int64_t depth = min_of(kDepth, width - k);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group_begin(args.rows, group), last = group_begin(args.rows, group + 1);
      uint16_t* at = to + k * args.rows + first * depth;
      for (int64_t i = k; i < k + depth; i += kStep) {
        const __mmask32 mask = first_of_32(in_features - i);
        for (int64_t m = first; m < last; ++m, at += kStep) {
          _mm512_store_si512(at, _mm512_maskz_loadu_epi16(mask, x + m * stride + i));
        }
      }
    }
  }
}

}  // namespace hf_fastpath
